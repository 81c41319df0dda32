"""How long bulk messages of the ring were under way on the link from the preceding rank.

The one idea: only time that a rank waited for a message which the other end had already handed over is the link's. Both
ends stamp every message on their own clocks; the sender's stamps ride along with its next vote, and what the two clocks
differ by is half the difference of the least times that votes took in the two directions (Mills, RFC 5905, section 8).
"""

import hashlib
import math
import struct
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

_HEAD = struct.Struct("!QddQ")
"""Whose clock, when this was sent, the least time that the other's frames seemed to take, the first stamp's number."""
_MOST_STAMPS = 8192
"""That wait for their other half, at either end: those of one step, unless its buckets are tiny. Older ones are
forgotten."""
_WINDOW = 32
"""Frames after which an old least time is forgotten, between once and twice that many: clocks drift."""


def boot_id() -> str:
    """Return what tells this machine's present boot, and with it its clock, from any other; empty: not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


class _Wait(NamedTuple):
    """One receive: when this rank began to wait for it, and when it had it."""

    number: int
    """Of the link's messages, which both ends count alike, from 0."""
    began_s: float
    ended_s: float


class _Least:
    """The least of the newest values, over a window that is never empty."""

    def __init__(self) -> None:
        self._before = self._now = math.inf
        self._count = 0

    def add(self, value: float) -> None:
        if self._count == _WINDOW:
            self._before, self._now, self._count = self._now, math.inf, 0
        self._now = min(self._now, value)
        self._count += 1

    @property
    def value(self) -> float:
        return min(self._before, self._now)


class LinkTimes:
    """One rank's side of the two links that it has in a ring.

    The ring's thread calls `handed_over` and `waited`, whoever exchanges votes the rest.

    Args:
        rank: this one.
        world_size: number of ranks, at least 2.
        clock: seconds; also the one of what the ring's thread tells.
        clock_name: equal where two ranks read the same clock, so that their times can be compared as they are; empty:
            nobody else reads it.
    """

    def __init__(
        self, rank: int, world_size: int, *, clock: Callable[[], float] = perf_counter, clock_name: str = ""
    ) -> None:
        self._preceding, self._following = (rank - 1) % world_size, (rank + 1) % world_size
        self._clock = clock
        self._own_clock = _number(clock_name) if clock_name else 0
        self._handed: deque[tuple[int, float]] = deque(maxlen=_MOST_STAMPS)
        self._num_handed = 0
        self._waits: deque[_Wait] = deque(maxlen=_MOST_STAMPS)
        self._num_waits = 0
        self._stamps: deque[tuple[int, float]] = deque(maxlen=_MOST_STAMPS)
        self._least = {self._preceding: _Least(), self._following: _Least()}
        self._theirs = math.inf
        """The least time that this rank's frames seemed to take to the preceding one."""
        self._same_clock = False

    def handed_over(self, at_s: float) -> None:
        """A message to the following rank was handed to the transport."""
        self._handed.append((self._num_handed, at_s))
        self._num_handed += 1

    def waited(self, began_s: float, ended_s: float) -> None:
        """A message of the preceding rank is here, for which this rank had nothing else to do since `began_s`."""
        self._waits.append(_Wait(self._num_waits, began_s, ended_s))
        self._num_waits += 1

    def aside(self, peer: int) -> bytes:
        """Return what rides along with a frame to `peer` that is sent now."""
        least = self._least.get(peer)
        if least is None:
            return b""
        first, stamps = 0, []
        if peer == self._following and self._handed:
            first = self._handed[0][0]
            stamps = [self._handed.popleft()[1] for _ in range(len(self._handed))]
        head = _HEAD.pack(self._own_clock, self._clock(), least.value, first)
        return head + struct.pack(f"!{len(stamps)}d", *stamps)

    def heard(self, peer: int, aside: bytes) -> None:
        """A frame of `peer` has just come, with this `aside`."""
        least = self._least.get(peer)
        if least is None or len(aside) < _HEAD.size:
            return
        clock, sent_s, theirs, first = _HEAD.unpack_from(aside)
        least.add(self._clock() - sent_s)
        if peer != self._preceding:
            return
        self._same_clock = clock == self._own_clock != 0
        self._theirs = theirs
        stamps = struct.unpack_from(f"!{(len(aside) - _HEAD.size) // 8}d", aside, _HEAD.size)
        self._stamps.extend(enumerate(stamps, start=first))

    def take(self) -> float:
        """Return for how many seconds since the last call this rank waited for messages that were under way.

        Those of the step that was voted on last: the other end's stamps come with its vote.
        """
        ahead_s = self._ahead_s()
        if not math.isfinite(ahead_s):
            return 0.0
        late_s = 0.0
        stamps, waits = self._stamps, self._waits
        while stamps and waits:
            if stamps[0][0] < waits[0].number:
                stamps.popleft()
            elif stamps[0][0] > waits[0].number:
                waits.popleft()
            else:
                wait, (_, handed_s) = waits.popleft(), stamps.popleft()
                late_s += max(0.0, wait.ended_s - max(wait.began_s, handed_s + ahead_s))
        return late_s

    def _ahead_s(self) -> float:
        """How much this rank's clock is ahead of the preceding rank's; infinite: not known yet."""
        if self._same_clock:
            return 0.0
        here = self._least[self._preceding].value
        return (here - self._theirs) / 2 if math.isfinite(here) and math.isfinite(self._theirs) else math.inf


def _number(clock_name: str) -> int:
    return int.from_bytes(hashlib.blake2b(clock_name.encode(), digest_size=8).digest(), "big") | 1
