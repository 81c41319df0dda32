"""The calls of a group, passed on to the group of the generation that this rank is in.

The one idea: whoever holds an elastic group never sees that there is another one inside. Only what a call raises is
translated: a rank that is lost ends a generation, not the run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ragtag.comm.device_sum import MakeDeviceSum
from ragtag.comm.group import Group
from ragtag.comm.ring import Wire
from ragtag.comm.transport import Transport
from ragtag.comm.work import Work
from ragtag.core.errors import PeerError, PeerLost
from ragtag.hub.frames import Go, Member


class GenerationEnded(PeerLost):
    """The ranks of this generation cannot go on together. Never leaves ragtag: `regroup` comes next."""


class Inner(Group, Protocol):
    """A group of one generation."""

    def abandon(self, reason: str) -> None:
        """Make every wait raise PeerLost with `reason`; from any thread."""
        ...


class PassingGroup:
    """A group whose calls go to `_inner`, or raise GenerationEnded where there is none or it is over."""

    elastic = True

    def __init__(self, member: Member, patience_s: float) -> None:
        self.member = member
        self.patience_s = patience_s
        self.local_rank = member.local_rank
        self.go: Go | None = None
        """Of the generation this worker is in, or was in last."""
        self._inner: Inner | None = None
        self.device_sum: MakeDeviceSum | None = None
        """For every generation to come."""
        self._broken = ""
        self._step, self._doing, self._doing_since_s = 0, "starting", time.monotonic()

    @property
    def rank(self) -> int:
        """This worker's rank in its generation, or in the last one that it was in."""
        if self._inner is not None:
            return self._inner.rank
        incs = [member.inc for member in self.go.members] if self.go is not None else []
        return incs.index(self.member.inc) if self.member.inc in incs else 0

    @property
    def world_size(self) -> int:
        """How many ranks this generation has."""
        return len(self.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name by rank."""
        return tuple(member.host for member in self.go.members) if self.go is not None else (self.member.host,)

    @property
    def step(self) -> int:
        """The step that others are told."""
        return self._step

    @property
    def doing(self) -> str:
        """What others are told this rank is doing."""
        return self._doing

    def note(self, step: int, doing: str) -> None:
        """Set what others are told about this rank."""
        self._step, self._doing, self._doing_since_s = step, doing, time.monotonic()
        if self._inner is not None:
            self._inner.note(step, doing)

    def all_reduce(
        self,
        flat: torch.Tensor,
        *,
        weights: Sequence[int] | None = None,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Work:
        """Queue the sum of `flat` over ranks, in place."""
        return self._group.all_reduce(flat, weights=weights, wire=wire, ready=ready)

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        *,
        wire: Wire | None = None,
        ready: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> Work:
        """Queue the sum of `flat` over ranks, of which each rank gets its own chunk."""
        return self._group.reduce_scatter(flat, sizes, wire=wire, ready=ready, done=done)

    def all_gather(self, flat: torch.Tensor, sizes: Sequence[int]) -> Work:
        """Queue the filling of every chunk of `flat` with what its owner has there."""
        return self._group.all_gather(flat, sizes)

    def exchange(self, payload: bytes, doing: str = "exchanging votes") -> tuple[bytes, ...]:
        """Return every rank's payload, by rank."""
        with self._translating():
            return self._group.exchange(payload, doing)

    def gather(self, name: str, value: Any) -> tuple[Any, ...]:
        """Return every rank's JSON-able value, by rank."""
        with self._translating():
            return self._group.gather(name, value)

    def claim(self, serial: int, decide: Callable[[int], int]) -> Work:
        """Queue a claim from pool number `serial`."""
        return self._group.claim(serial, decide)

    def post(self, name: str) -> Work:
        """Queue a note for all ranks."""
        return self._group.post(name)

    def posted(self, name: str) -> Work:
        """Queue a look whether any rank has posted `name`."""
        return self._group.posted(name)

    def take_link_s(self) -> float:
        """Return how long this rank has waited for what was under way."""
        return self._inner.take_link_s() if self._inner is not None else 0.0

    def count_sent(self, num_bytes: int) -> None:
        """From a job: so many bytes were handed to a link."""
        self._group.count_sent(num_bytes)

    def take_sent_bytes(self) -> int:
        """Return how many bytes were handed to links since the last call."""
        return self._inner.take_sent_bytes() if self._inner is not None else 0

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` in place with those of rank `source`."""
        with self._translating():
            self._group.broadcast(tensors, source)

    def on_transport(self, job: Callable[[Transport], Any]) -> Work:
        """Queue a `job` that sends and receives between single ranks."""
        return self._group.on_transport(job)

    def nudge(self) -> None:
        """From a job: let those who wait look again."""
        self._group.nudge()

    def barrier(self, doing: str) -> None:
        """Return when every rank has come."""
        with self._translating():
            self._group.barrier(doing)

    def wait(self, work: Work, doing: str, until: Callable[[], bool] | None = None) -> None:
        """Return when `work` is done, or `until` is true; or raise its error."""
        with self._translating():
            self._group.wait(work, doing, until)

    @property
    def _group(self) -> Inner:
        inner = self._inner
        if inner is None:
            raise GenerationEnded(self._broken or "this worker is between two generations")
        return inner

    @contextmanager
    def _translating(self) -> Iterator[None]:
        self._look_at_hub()
        if self._broken:  # a group of one would never notice
            raise GenerationEnded(self._broken)
        try:
            yield
        except GenerationEnded:
            raise
        except PeerError as error:
            raise self._translated(error) from None

    def _look_at_hub(self) -> None:
        """Note where this rank may not go on."""

    def _translated(self, error: PeerError) -> PeerError:
        """What this rank raises instead."""
        return error
