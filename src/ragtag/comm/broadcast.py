"""Copies tensors from one rank to all others, along a chain.

The one idea: tensors are cut into segments, and each rank passes a segment on while it receives the next one; so a
large state takes about the time of one link, whatever the number of ranks.
"""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from ragtag.comm.transport import TAG_LIMIT, Pending, Transport

SEGMENT_BYTES = 4 << 20
_SENDS_AHEAD = 16
"""How many segments a slow link may be behind, and so how much host memory tensors of an accelerator take."""


def chain_broadcast(transport: Transport, tensors: Sequence[torch.Tensor], source: int, number: int) -> None:
    """Overwrite `tensors` on every rank, in place, with those of rank `source`.

    Any dtypes and shapes, 0-dim and empty ones too, equal on all ranks; other devices go through host memory.
    `number` counts the calls. Ranks that disagree about shapes never match, so that they wait (bounded) instead of
    writing past a buffer. Raises TransportError.
    """
    rank, world_size = transport.rank, transport.world_size
    position = (rank - source) % world_size
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size
    last = position == world_size - 1
    tag = _tag(number, source, tensors)
    sent: deque[Pending] = deque()
    try:
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            values = tensor.detach()
            host = values.to("cpu").contiguous()
            for segment in _segments(host):
                if position > 0:
                    transport.receive(segment, previous, tag).wait()
                if not last:
                    sent.append(transport.send(segment, following, tag))
                if len(sent) > _SENDS_AHEAD:
                    sent.popleft().wait()
            if position > 0 and host.data_ptr() != values.data_ptr():
                with torch.no_grad():
                    tensor.copy_(host)
        for pending in sent:
            pending.wait()
    finally:
        # After an error the traceback keeps this frame, and unfinished messages would keep connections open.
        sent.clear()


def _segments(host: torch.Tensor) -> Iterator[torch.Tensor]:
    # A 0-dim tensor cannot be viewed as bytes; a flat one can.
    content = host.reshape(-1).view(torch.uint8)
    yield from content.split(SEGMENT_BYTES)


def _tag(number: int, source: int, tensors: Sequence[torch.Tensor]) -> int:
    # The upper half of the tags: the lower one belongs to rings on the same transport.
    kinds = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    half = TAG_LIMIT // 2
    return half + zlib.crc32(repr((number, source, kinds)).encode()) % (half - 1)
