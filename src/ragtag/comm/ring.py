"""Ring reductions over chunks of any sizes, and the all-to-all exchange of votes.

The one idea: each chunk is cut into segments, each segment travels its own path round the ring, and every rank
handles its events in the order of one key that grows along every path; so links stay full whatever the chunk sizes.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from time import perf_counter, thread_time
from typing import Literal, NamedTuple

import torch

from ragtag.comm.link_times import LinkTimes
from ragtag.comm.transport import TAG_LIMIT, Pending, Transport
from ragtag.core.errors import SettingError

Wire = Literal["fp32", "bf16"]

SEGMENT_BYTES = 4 << 20
"""Most bytes in one message, chosen with `scripts/bench ring --segments`: a message costs thread switches at both
ends, so on loopback (30 M floats, 3 ranks, 2 cores) 256 KiB took 2.4 times as long as 4 MiB; over 1 Gbit/s, equal
chunks, sizes of 256 KiB and more were alike."""

_RECEIVES_AHEAD = 4
_HALF_TAGS = TAG_LIMIT // 2


class Event(NamedTuple):
    """What one rank does with one segment flat[start:stop]: receive it, add or store it, send it on."""

    start: int
    stop: int
    receives: bool
    adds: bool
    sends: bool
    completes: bool
    """The segment's sum is complete here: this rank owns it."""


@lru_cache(maxsize=256)
def schedule(
    chunks: tuple[int, ...], segment: int, rank: int, first_hop: int, last_hop: int
) -> tuple[tuple[Event, ...], int]:
    """Return rank's events in order, for chunks cut evenly into pieces of at most `segment` elements, and the
    largest piece it adds.

    The whole path of chunk o in a ring of n ranks: hop 0 at rank o + 1, which sends its values; each next rank adds
    its own and sends on; hop n - 1 at rank o, where the sum is complete; hops n .. 2n - 2 carry it round once more.
    Reduce-scatter is hops 0 .. n-1, all-gather n-1 .. 2n-2, all-reduce all of them in one pass.

    An event's key is hop + slot, where the slots of a chunk's k pieces are spread evenly over those of the chunk
    with most pieces. **It can't deadlock:** ranks handle events in order of the key and block only to receive. Take
    the unfinished event with the least key: all before it on its rank are finished, so its receive is posted, and
    the event that sends to it, one hop back, has a key smaller by one, so it is finished and its send posted.
    (Sends are waited for only after all events.) With an order whose key falls somewhere along a path, ranks wait in
    a circle: each its own chunk first, say, which the others have all put later.

    Since all keys of a link's messages differ by one between its two ends, and ties are broken by (chunk, piece),
    both ends post them in the same order: one tag per call is enough, and a bounded window of receives too.
    """
    world_size = len(chunks)
    num_pieces = [-(-size // segment) for size in chunks]
    num_slots = max(num_pieces)
    keyed: list[tuple[int, int, int, Event]] = []
    largest = 0
    offset = 0
    for chunk, (size, pieces) in enumerate(zip(chunks, num_pieces)):
        distance = (rank - chunk - 1) % world_size
        for hop in (distance, distance + world_size):
            if not first_hop <= hop <= last_hop:
                continue
            receives, sends = hop > first_hop, hop < last_hop
            adds = receives and hop < world_size
            for piece in range(pieces):
                slot = (2 * piece + 1) * num_slots // (2 * pieces)
                start, stop = offset + size * piece // pieces, offset + size * (piece + 1) // pieces
                largest = max(largest, (stop - start) * adds)
                event = Event(start, stop, receives, adds, sends, hop == world_size - 1)
                keyed.append((hop + slot, chunk, piece, event))
        offset += size
    return tuple(event for *_, event in sorted(keyed)), largest


class RingTime(NamedTuple):
    """What one call cost the thread that made it."""

    add_cpu_s: float = 0.0
    """Processor seconds of adding what was received."""
    cpu_s: float = 0.0
    """Processor seconds of all of it; sockets are mostly read on the transport's own thread."""
    busy_s: float = 0.0
    """Seconds in which it did not wait for other ranks."""


class Ring:
    """Sums flat tensors over all ranks of a transport, in place. One call at a time; ranks call in the same order.

    Every call takes `flat`, a contiguous 1-D tensor; `chunks`, one size per rank, summing to its length (chunk r is
    what rank r owns; 0 is allowed); `tag`, the number of the call, the same on all ranks (any integer: what goes on the
    wire is a 30-bit hash of the whole call, apart from `mesh_exchange`'s); and `wire`.

    fp32, fp64 and integers are summed in their own dtype; bf16 and fp16 in fp32, rounded once at the end; tensors
    of an accelerator in host memory. `wire="bf16"` halves the bytes of fp32: partial sums are rounded each time they
    are sent, accumulated in fp32, and the owner rounds its sum before it sends it. A sum is made at one rank only,
    in ring order, so all ranks end with identical bits in any case.

    `times` is told when each message was handed over or had. Buffers are allocated at first use and kept. Raises
    TransportError, after which tensor and ring are spent, and SettingError for a bf16 wire of other dtypes.
    """

    def __init__(
        self, transport: Transport, segment_bytes: int = SEGMENT_BYTES, times: LinkTimes | None = None
    ) -> None:
        self._transport = transport
        self._times = times
        self._segment_bytes = segment_bytes
        self.sent_bytes = 0
        """Handed to the transport so far."""
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def reduce_scatter(self, flat: torch.Tensor, chunks: Sequence[int], tag: int, wire: Wire | None = None) -> RingTime:
        """Leave the sum in this rank's own chunk (never rounded to the wire); the other chunks hold leftovers."""
        return self._reduce(flat, chunks, tag, wire, 0, self._transport.world_size - 1)

    def all_gather(self, flat: torch.Tensor, chunks: Sequence[int], tag: int, wire: Wire | None = None) -> RingTime:
        """Fill every chunk with its owner's values; a bf16 wire rounds the owner's too."""
        world_size = self._transport.world_size
        return self._reduce(flat, chunks, tag, wire, world_size - 1, 2 * world_size - 2)

    def all_reduce(self, flat: torch.Tensor, chunks: Sequence[int], tag: int, wire: Wire | None = None) -> RingTime:
        """Leave the sum everywhere: both of the above, segment by segment in one pass. Returns what it cost."""
        return self._reduce(flat, chunks, tag, wire, 0, 2 * self._transport.world_size - 2)

    def _reduce(
        self, flat: torch.Tensor, chunks: Sequence[int], tag: int, wire: Wire | None, first_hop: int, last_hop: int
    ) -> RingTime:
        world_size = self._transport.world_size
        assert flat.dim() == 1, "the ring takes flat tensors"
        assert len(chunks) == world_size, f"{len(chunks)} chunks for {world_size} ranks"
        assert sum(chunks) == flat.numel(), f"chunks {list(chunks)} do not sum to {flat.numel()} elements"
        half = flat.dtype in (torch.bfloat16, torch.float16)
        if wire == "bf16" and not half and flat.dtype != torch.float32:
            raise SettingError(f'wire="bf16" carries fp32, bf16 and fp16 tensors, not {flat.dtype}; use wire="fp32".')
        if world_size == 1 or flat.numel() == 0:
            return RingTime()
        if half or flat.device.type != "cpu" or not flat.is_contiguous():
            host = self._buffer("host", flat.numel(), torch.float32 if half else flat.dtype)
            host.copy_(flat)
            spent = self._travel(host, tuple(chunks), tag, wire, first_hop, last_hop)
            flat.copy_(host)
            return spent
        return self._travel(flat, tuple(chunks), tag, wire, first_hop, last_hop)

    def _travel(
        self, flat: torch.Tensor, chunks: tuple[int, ...], tag: int, wire: Wire | None, first_hop: int, last_hop: int
    ) -> RingTime:
        transport, times = self._transport, self._times
        began_s, began_cpu_s = perf_counter(), thread_time()
        waited_s = add_cpu_s = 0.0
        rounded = wire == "bf16"
        # The tag holds the whole call: ranks that disagree never match and time out, where gloo would end the process
        # over a message that is larger than its receive.
        call = f"{tag}/{first_hop}/{last_hop}/{flat.dtype}/{rounded}/{self._segment_bytes}/{chunks}"
        tag = zlib.crc32(call.encode()) % _HALF_TAGS
        # What is sent and stored: the tensor itself or its rounded image. A complete segment comes back only after
        # the next rank has received what we sent from the same place, so one image serves both directions.
        carried = self._buffer("carried", flat.numel(), torch.bfloat16) if rounded else flat
        # A chunk above the average is cut, or the links on its path would work one after another.
        average = -(-flat.numel() // transport.world_size)
        segment = max(1, min(self._segment_bytes // carried.element_size(), average))
        events, largest = schedule(chunks, segment, transport.rank, first_hop, last_hop)
        partial = self._buffer("partial", largest * _RECEIVES_AHEAD, carried.dtype)
        following = (transport.rank + 1) % transport.world_size
        preceding = (transport.rank - 1) % transport.world_size
        coming = [event for event in events if event.receives]
        posted: deque[tuple[torch.Tensor, Pending]] = deque()
        sent: list[Pending] = []
        num_posted = 0

        def post_receive() -> None:
            nonlocal num_posted
            start, stop, _, adds, _, _ = coming[num_posted]
            if adds:
                at = num_posted % _RECEIVES_AHEAD * largest
                target = partial[at : at + stop - start]
            else:
                target = carried[start:stop]
            posted.append((target, transport.receive(target, preceding, tag)))
            num_posted += 1

        for _ in coming[:_RECEIVES_AHEAD]:
            post_receive()
        for start, stop, receives, adds, sends, completes in events:
            if receives:
                target, pending = posted.popleft()
                waits_s = perf_counter()
                pending.wait()
                got_s = perf_counter()
                waited_s += got_s - waits_s
                if times is not None:
                    times.waited(waits_s, got_s)
                if adds:
                    adding_s = thread_time()
                    flat[start:stop].add_(target)
                    add_cpu_s += thread_time() - adding_s
                elif rounded:
                    flat[start:stop].copy_(target)
            if sends:
                if rounded and (adds or not receives):
                    carried[start:stop].copy_(flat[start:stop])
                    if completes:
                        flat[start:stop].copy_(carried[start:stop])
                if times is not None:
                    times.handed_over(perf_counter())
                sent.append(transport.send(carried[start:stop], following, tag))
                self.sent_bytes += (stop - start) * carried.element_size()
            if receives and num_posted < len(coming):
                post_receive()
        waits_s = perf_counter()
        for pending in sent:
            pending.wait()
        busy_s = waits_s - began_s - waited_s
        return RingTime(add_cpu_s, thread_time() - began_cpu_s, busy_s)

    def _buffer(self, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[purpose, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size]


def mesh_exchange(transport: Transport, payload: torch.Tensor, tag: int) -> list[torch.Tensor]:
    """Send `payload` (uint8, the same size everywhere) from each rank to each, and return all of them by rank.

    One hop, so the latency of a vote does not grow with the ring. `tag` wraps at 2**30 and never meets a ring's.
    """
    tag = _HALF_TAGS + tag % (_HALF_TAGS - 1)
    rank, world_size = transport.rank, transport.world_size
    peers = [(rank + distance) % world_size for distance in range(1, world_size)]
    payloads = [payload if peer == rank else torch.empty_like(payload) for peer in range(world_size)]
    pending = [transport.receive(payloads[peer], peer, tag) for peer in peers]
    pending += [transport.send(payload, peer, tag) for peer in peers]
    for message in pending:
        message.wait()
    return payloads
