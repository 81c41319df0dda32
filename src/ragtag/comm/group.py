"""The ranks of one run as seen from one of them: the interface, and the world of one.

The one idea: code above this room never asks how many ranks there are; one rank gives the same answers without
threads or sockets. `ring_group.py` holds the world of several.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch

from ragtag.comm.device_sum import MakeDeviceSum
from ragtag.comm.ring import Wire
from ragtag.comm.transport import Transport
from ragtag.comm.work import Work
from ragtag.core.errors import PeerError


class Group(Protocol):
    """The ranks of one run. One thread of each rank calls it, in the same order on every rank.

    All waits are bounded by `patience_s` (seconds), ten times that for ranks whose heartbeats live but who do not
    come. They raise PeerFailed (a rank told us its error) or PeerLost (it died, froze or left), which carry the rank
    and host; `origin_rank` is the rank that prints it.
    """

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def local_rank(self) -> int:
        """Number of this rank on its host."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name by rank."""
        ...

    @property
    def patience_s(self) -> float:
        """Seconds that bound every wait."""
        ...

    device_sum: MakeDeviceSum | None
    """What sums tensors where they are; None: the ring does, through host memory."""

    @property
    def elastic(self) -> bool:
        """Whether ranks come and go: then a step is applied only after everybody has said that it holds it."""
        ...

    @property
    def step(self) -> int:
        """The step that others are told."""
        ...

    @property
    def doing(self) -> str:
        """What others are told this rank is doing."""
        ...

    @property
    def failure(self) -> PeerError | None:
        """What ended the group, if anything did: for those who wait for something else than the group."""
        ...

    def note(self, step: int, doing: str) -> None:
        """Set what others are told about this rank; two attribute writes."""
        ...

    def all_reduce(
        self,
        flat: torch.Tensor,
        *,
        weights: Sequence[int] | None = None,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Work:
        """Queue the sum of `flat` (contiguous, 1-D) over ranks, in place; call `wait` before touching it again.

        `weights` are relative chunk sizes by rank (None: equal); `ready` runs first on the channel's thread.
        """
        ...

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        *,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> Work:
        """Queue the sum of `flat` (contiguous, 1-D) over ranks, of which each rank gets its own chunk, in place; the
        other chunks hold leftovers. `sizes` are the chunks' elements by rank; `ready` runs first and `done` last on the
        channel's thread.
        """
        ...

    def all_gather(self, flat: torch.Tensor, sizes: Sequence[int]) -> Work:
        """Queue the filling of every chunk of `flat` (contiguous, 1-D) with what its owner has there."""
        ...

    def exchange(self, payload: bytes, doing: str = "exchanging votes") -> tuple[bytes, ...]:
        """Return every rank's payload, by rank; the same length everywhere."""
        ...

    def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Return every rank's JSON-able value, by rank. Raises DisagreementError when names differ."""
        ...

    def claim(self, serial: int, decide: Callable[[int], int]) -> Work:
        """Queue a claim from pool number `serial`; the work's result is (how many were claimed before, how many it
        claims).

        `decide` is told how many are claimed, and returns how many more to claim; it runs on another thread.
        """
        ...

    def post(self, name: str) -> Work:
        """Queue a note for all ranks, called `name`, without waiting for any of them."""
        ...

    def posted(self, name: str) -> Work:
        """Queue a look whether any rank has posted `name`; the work's result says so."""
        ...

    def take_link_s(self) -> float:
        """Return for how many seconds since the last call this rank has waited for what the preceding rank had already
        handed over, in the sums up to the last exchange before this call."""
        ...

    def count_sent(self, num_bytes: int) -> None:
        """From a job: so many bytes were handed to a link."""
        ...

    def take_sent_bytes(self) -> int:
        """Return how many bytes of sums and of jobs that count them were handed to links since the last call; votes and
        other short messages are not in it."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` in place with those of rank `source`."""
        ...

    def on_transport(self, job: Callable[[Transport], Any]) -> Work:
        """Queue a `job` that sends and receives between single ranks; the work's result is what it returns."""
        ...

    def nudge(self) -> None:
        """From a job: let those who wait `until` something look again."""
        ...

    def barrier(self, doing: str) -> None:
        """Return when every rank has come."""
        ...

    def confirm(self) -> None:
        """Return if the others have not gone on without this rank, as far as can be known without asking all of them;
        raise what ended the group if they have."""
        ...

    def wait(self, work: Work, doing: str, until: Callable[[], bool] | None = None) -> None:
        """Return when `work` is done, or before, when `until` is true; raise its error, PeerFailed or PeerLost."""
        ...

    def announce_failure(self, error: BaseException, doing: str) -> None:
        """Tell all ranks that this one fails; the first failure wins. Bounded, never raises."""
        ...

    def close(self) -> bool:
        """Say goodbye and let go of threads and sockets; return whether every thread ended. May be called twice."""
        ...


def raise_failure(group: Group) -> None:
    """Between two pieces of own work, or while waiting for something else than the group: raise what has ended it."""
    if (failure := group.failure) is not None:
        raise failure


class SoloGroup:
    """A world of one: no threads, no sockets, the same answers."""

    elastic = False

    def __init__(self, patience_s: float, host: str = "localhost") -> None:
        self.rank = 0
        self.world_size = 1
        self.local_rank = 0
        self.hosts: tuple[str, ...] = (host,)
        self.patience_s = patience_s
        self.step = 0
        self.doing = "starting"
        self.failure: PeerError | None = None
        self.device_sum: MakeDeviceSum | None = None
        self._num_works = 0

    def note(self, step: int, doing: str) -> None:
        """Set `step` and `doing`."""
        self.step, self.doing = step, doing

    def all_reduce(
        self,
        flat: torch.Tensor,
        *,
        weights: Sequence[int] | None = None,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Work:
        """Run `ready` now; the sum over one rank is the tensor itself."""
        self._num_works += 1
        work = Work("data", self._num_works)
        work.run(ready or (lambda: None))
        return work

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        *,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> Work:
        """Run `ready` and `done` now; the sum over one rank is the tensor itself."""

        def job() -> None:
            for each in (ready, done):
                if each is not None:
                    each()

        return self.all_reduce(flat, ready=job)

    def all_gather(self, flat: torch.Tensor, sizes: Sequence[int]) -> Work:
        """Do nothing: all of it is here."""
        return self.all_reduce(flat)

    def exchange(self, payload: bytes, doing: str = "exchanging votes") -> tuple[bytes, ...]:
        """Return the payload."""
        return (bytes(payload),)

    def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Return the value as JSON gives it back, as with more ranks."""
        return (msgspec.json.decode(msgspec.json.encode(value)),)

    def claim(self, serial: int, decide: Callable[[int], int]) -> Work:
        """Refuse: there is nobody to pull work from."""
        raise AssertionError("one rank has all the work already")

    def post(self, name: str) -> Work:
        """Refuse: there is nobody to read it."""
        raise AssertionError("one rank has nobody to tell")

    def posted(self, name: str) -> Work:
        """Refuse: there is nobody to post it."""
        raise AssertionError("one rank is told nothing")

    def take_link_s(self) -> float:
        """Return 0: there is no link."""
        return 0.0

    def count_sent(self, num_bytes: int) -> None:
        """Refuse: there is nobody to send to."""
        raise AssertionError("one rank sends nothing")

    def take_sent_bytes(self) -> int:
        """Return 0."""
        return 0

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Do nothing."""

    def on_transport(self, job: Callable[[Transport], Any]) -> Work:
        """Refuse: there is nobody to send to."""
        raise AssertionError("one rank has no transport")

    def nudge(self) -> None:
        """Do nothing."""

    def barrier(self, doing: str) -> None:
        """Return at once."""

    def confirm(self) -> None:
        """Return at once."""

    def wait(self, work: Work, doing: str, until: Callable[[], bool] | None = None) -> None:
        """Raise the error of `work`, if any."""
        if work.error is not None:
            raise work.error

    def announce_failure(self, error: BaseException, doing: str) -> None:
        """Do nothing: there is nobody to tell."""

    def close(self) -> bool:
        """Return True."""
        return True
