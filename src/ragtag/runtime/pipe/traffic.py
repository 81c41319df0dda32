"""Activations and their gradients on their way between neighbouring stages, during one step.

The one idea: a thread of the group receives everything that comes, in the order in which it will be used, so that what
is next is there or on its way while this rank computes; sends are posted and not waited for before the step's end.
Each tensor goes behind a header that says what it is, so micro-batches may be of any size and shape.
"""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ragtag.comm.group import Group, Work
from ragtag.comm.transport import TAG_LIMIT, Pending, Transport
from ragtag.core.errors import ModelError
from ragtag.runtime.pipe.order import Turn

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 12
_NOTHING = -1
"""In place of the number of dimensions: no tensor comes."""
_HEADER = struct.Struct(f"<3q{_MOST_DIMENSIONS}q")
HEADER_BYTES = _HEADER.size
"""What goes before each tensor."""
_FORWARD_TAG, _BACKWARD_TAG = TAG_LIMIT - 16, TAG_LIMIT - 15


class Parcel(NamedTuple):
    """A tensor that came, in host memory."""

    tensor: torch.Tensor
    wants_gradient: bool
    """Whether a gradient of it is to be sent back."""


class Traffic:
    """Of one rank in one step.

    Args:
        group: the ranks of the run, all of which make one of these at the same time.
        before: the rank of the stage before; None: this is the first one, or in no pipeline.
        after: that of the stage after; None: this is the last one.
        turns: what this rank computes, in order.
        backward: whether gradients come back.
        doing: what others are told this rank waits for.
    """

    def __init__(
        self,
        group: Group,
        *,
        before: int | None,
        after: int | None,
        turns: Sequence[Turn],
        backward: bool,
        doing: str = "passing activations",
    ) -> None:
        self._group, self._before, self._after, self._backward, self._doing = group, before, after, backward, doing
        self._coming = [turn for turn in turns if (before if turn.forward else after) is not None]
        self._came: dict[Turn, Parcel | None] = {}
        self._transport: Transport | None = None
        self._sent: list[tuple[Pending, torch.Tensor]] = []
        self._work: Work = group.on_transport(self._receive_all)

    # ---- on the group's thread

    def _receive_all(self, transport: Transport) -> None:
        self._transport = transport
        self._group.nudge()
        for turn in self._coming:
            peer = self._before if turn.forward else self._after
            assert peer is not None
            self._came[turn] = _receive(transport, peer, _FORWARD_TAG if turn.forward else _BACKWARD_TAG)
            self._group.nudge()

    # ---- on the training thread

    def receive(self, turn: Turn) -> Parcel | None:
        """Wait for what comes for `turn` (bounded by the group); None: no gradient comes back.

        Raises:
            PeerFailed, PeerLost: a rank failed or is gone.
        """
        self._wait(lambda: turn in self._came)
        return self._came.pop(turn)

    def hand_on(self, tensor: torch.Tensor) -> None:
        """Send a micro-batch to the next stage, in the order of turns."""
        assert self._after is not None
        wanted = tensor.requires_grad and self._backward
        self._send(tensor.detach(), self._after, _FORWARD_TAG, wants_gradient=wanted)

    def send_back(self, gradient: torch.Tensor | None) -> None:
        """Send the gradient of what was received to the stage before; None: there is none."""
        assert self._before is not None
        self._send(gradient, self._before, _BACKWARD_TAG, wants_gradient=False)

    def finish(self) -> None:
        """Wait until everything has arrived where it belongs."""
        self._group.wait(self._work, self._doing)
        for pending, _ in self._sent:
            pending.wait()
        self._sent.clear()

    def _send(self, tensor: torch.Tensor | None, peer: int, tag: int, *, wants_gradient: bool) -> None:
        self._wait(lambda: self._transport is not None)
        assert self._transport is not None
        header = _header(tensor, wants_gradient)
        if tensor is None:
            content = header[:0]
        else:
            content = tensor.contiguous().cpu().view(-1).view(torch.uint8)
        for each in (header, content) if content.numel() else (header,):
            self._sent.append((self._transport.send(each, peer, tag), each))
        self._group.count_sent(header.numel() + content.numel())

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not ready():
            self._group.wait(self._work, self._doing, until=ready)


def _header(tensor: torch.Tensor | None, wants_gradient: bool) -> torch.Tensor:
    if tensor is None:
        return torch.frombuffer(bytearray(_HEADER.pack(0, _NOTHING, 0, *[0] * _MOST_DIMENSIONS)), dtype=torch.uint8)
    if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMENSIONS:
        raise ModelError(
            f"a block hands on a tensor of {tensor.dtype} with {tensor.dim()} dimensions; between the stages of a "
            f"pipeline travel tensors of {', '.join(str(dtype) for dtype in _DTYPES)}."
        )
    shape = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    packed = _HEADER.pack(_DTYPES.index(tensor.dtype), tensor.dim(), wants_gradient, *shape)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _receive(transport: Transport, peer: int, tag: int) -> Parcel | None:
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    transport.receive(header, peer, tag).wait()
    dtype_number, num_dimensions, wants_gradient, *sizes = _HEADER.unpack(header.numpy().tobytes())
    if num_dimensions == _NOTHING:
        return None
    tensor = torch.empty(sizes[:num_dimensions], dtype=_DTYPES[dtype_number])
    if tensor.numel():
        transport.receive(tensor.view(-1).view(torch.uint8), peer, tag).wait()
    return Parcel(tensor, bool(wants_gradient))
