"""What one worker has to do with an elastic run besides its group: how it may end, what it could bring, and the seams.

The one idea: each end of a worker is an error of its own with an exit status of its own, so that its launcher knows
whether another worker is to take its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragtag.comm.passing import Inner
from ragtag.comm.process_exit import EVICTED_STATUS, HUB_LOST_STATUS
from ragtag.core.errors import PeerError, PeerLost
from ragtag.hub.frames import Frame, Go


class Evicted(PeerError):
    """The others gave this worker up and went on without it; a new process may join in its place."""

    exit_status = EVICTED_STATUS


class HubLost(PeerLost):
    """The hub has been away for longer than the patience, and nobody goes on without it."""

    exit_status = HUB_LOST_STATUS


class RunOver(PeerError):
    """The others have ended their scripts as they should; this worker came too late to take part."""

    exit_status = 0


class Hub(Protocol):
    """The worker's end of the connection to the hub."""

    @property
    def lost_for_s(self) -> float:
        """Seconds since the hub was last heard; 0 while connected."""
        ...

    @property
    def heard_ago_s(self) -> float:
        """Seconds since it was last heard, by a clock that goes on while this process is frozen."""
        ...

    def send(self, frame: Frame) -> None:
        """Queue a frame; never blocks."""
        ...

    def send_lines(self, inc: str, lines: Sequence[bytes], /) -> None:
        """Queue lines of the event log, which may get lost; never blocks."""
        ...

    def close(self) -> object:
        """End the connection after what is queued was sent, bounded."""
        ...


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What this worker could bring into a generation."""

    has_state: bool = False
    applied: int = 0
    applied_digest: str = ""
    held_digest: str = ""
    in_call: str = ""


class Forming(Protocol):
    """Whoever waits for a group to form."""

    def broken(self) -> bool:
        """Whether the generation is over already."""
        ...

    def take(self, inner: Inner) -> None:
        """From now on `inner` can be told that it is over."""
        ...


Form = Callable[[Go, int, Forming], Inner]
"""Connects the members of a `Go` as its rank. Raises PeerError, TransportError or LaunchError."""
