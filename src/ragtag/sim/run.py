"""The virtual clock: steps, failures and repairs in order of time, until the hours or the steps are over.

The one idea: the list of who comes and goes is known beforehand, so steps between two changes are computed in blocks of
rows, and the clock jumps from block to block. No event queue is needed, because nothing but a change interrupts a step.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ragtag.core.decision import Decision
from ragtag.sim.account import Account
from ragtag.sim.baselines import EqualBatches
from ragtag.sim.block import Block
from ragtag.sim.cluster import VirtualCluster
from ragtag.sim.following import FollowingSpeeds
from ragtag.sim.membership import Change, starts_absent
from ragtag.sim.result import Simulated

Recovery = Literal["take over", "restart", "go on"]
"""After a failure: the others do the dead rank's work ("take over"); all start again from the last checkpoint
("restart"); nobody notices ("go on")."""

Way = Literal["ragtag", "ragtag, restarting", "even DDP", "dropping stragglers"]
WAYS: dict[Way, Recovery] = {
    "ragtag": "take over",
    "ragtag, restarting": "restart",
    "even DDP": "restart",
    "dropping stragglers": "go on",
}


class Recovering(msgspec.Struct, frozen=True, kw_only=True):
    """What failures cost, in seconds."""

    restart_s: float = 30.0
    """From a failure until all train again from the checkpoint."""
    checkpoint_s: float = 2.0
    """What writing one costs everybody; written as often as is best for the rate of failures (Young, "A first order
    approximation to the optimum checkpoint interval", 1974): every sqrt(2 * checkpoint_s * time between failures)."""
    regroup_s: float = 0.5
    """From a failure, or a join, until the others are one group again."""


class _Training(Protocol):
    @property
    def shares(self) -> tuple[int, ...]: ...
    @property
    def decisions(self) -> tuple[Decision, ...]: ...
    def attend(self, present: NDArray[np.bool_]) -> None: ...
    def block(self, first: int, most: int, now_s: float) -> Block: ...
    def commit(self, block: Block, now_s: float) -> None: ...


def simulate(
    way: Way,
    cluster: VirtualCluster,
    *,
    duration_s: float = math.inf,
    steps: int | None = None,
    changes: Sequence[Change] = (),
    recovering: Recovering | None = None,
) -> Simulated:
    """Train on `cluster` until `duration_s` virtual seconds or `steps` committed steps are over.

    `changes` are in order of time. Where failures are met by a restart, a device that joins waits for the next one, or
    for a checkpoint after which it pays to restart for it.
    """
    assert steps is not None or duration_s < math.inf, "a run that does not end"
    return _Clock(way, cluster, duration_s, steps or (1 << 62), changes, recovering or Recovering()).run()


class _Clock:
    def __init__(
        self,
        way: Way,
        cluster: VirtualCluster,
        duration_s: float,
        steps: int,
        changes: Sequence[Change],
        recovering: Recovering,
    ) -> None:
        self._way: Way = way
        self._recovery = WAYS[way]
        self._cluster, self._duration_s, self._steps, self._costs = cluster, duration_s, steps, recovering
        self._changes = deque(change for change in changes if change.at_s < duration_s)
        self._present = ~np.array(starts_absent(cluster.size, changes))
        self._training: _Training | None = None
        self._account = Account(cluster)
        self._decisions: list[Decision] = []
        self._now_s, self._step, self._attempts = 0.0, 0, 0
        failures = sum(not change.joins for change in self._changes)
        self._between_failures_s = self._changes[-1].at_s / failures if failures else math.inf
        self._interval_s = math.sqrt(2 * recovering.checkpoint_s * self._between_failures_s)
        self._checkpoint_at_s, self._kept_at_s = self._interval_s, 0.0

    def run(self) -> Simulated:
        self._gather()
        while self._step < self._steps and self._now_s < self._duration_s:
            if self._training is None:
                if not self._changes:
                    break
                self._pass_until(self._changes[0].at_s)
                self._gather()
            elif not self._make_steps(self._training):
                break
        self._decisions.extend(self._training.decisions if self._training else ())
        return self._account.result(self._way, self._now_s, self._step, self._decisions)

    def _make_steps(self, training: _Training) -> bool:
        """Commit steps up to the next change; False: none ends in time."""
        block = training.block(self._attempts + 1, self._steps - self._step, self._now_s)
        ends_s = self._now_s + np.cumsum(block.wall_s)
        change_s = self._changes[0].at_s if self._changes else math.inf
        whole = int(np.searchsorted(ends_s, min(change_s, self._duration_s), side="right"))
        if self._recovery == "restart":
            whole = min(whole, int(np.searchsorted(ends_s, self._checkpoint_at_s)) + 1)
        if whole:
            block = block.head(whole)
            end_s = float(ends_s[whole - 1])
            self._account.commit(block, self._present, training.shares, self._now_s)
            self._step, self._attempts, self._now_s = self._step + whole, self._attempts + whole, end_s
            training.commit(block, end_s)
            if self._recovery == "restart" and end_s >= self._checkpoint_at_s:
                self._pass_until(end_s + self._costs.checkpoint_s, again_s=self._costs.restart_s)
                if (self._working & ~self._present).any():
                    self._gather()
                self._account.keep(self._step)
                self._take_in()
                self._checkpoint_at_s, self._kept_at_s = self._now_s + self._interval_s, self._now_s
            return True
        if self._changes and change_s < self._duration_s:
            self._meet(self._changes.popleft())
            return True
        return False

    def _meet(self, change: Change) -> None:
        """A device comes or goes in the middle of a step."""
        name, at_s, before_s = self._cluster.devices[change.rank].name, max(change.at_s, self._now_s), self._now_s
        if change.joins == bool(self._present[change.rank]):
            return
        if change.joins:
            self._present[change.rank] = True
            if self._recovery == "go on":
                self._gather()
            elif self._recovery == "take over":
                self._pass_until(self._now_s + self._costs.regroup_s)
                self._gather()
            self._account.note(at_s, name, "joins", self._now_s - before_s)
            return
        working = self._working[change.rank]
        if self._recovery == "take over" and working and self._present.sum() > 1:
            # The step itself is not lost.
            before_s += self._take_over(change.rank)
        elif self._recovery == "restart" and working:
            before_s = self._kept_at_s
            self._pass_until(at_s)
            self._present[change.rank] = False
            self._step = self._account.lose()
            self._pass_until(at_s + self._costs.restart_s, again_s=self._costs.restart_s)
            self._checkpoint_at_s, self._kept_at_s = self._now_s + self._interval_s, self._now_s
            self._gather()
        else:
            self._present[change.rank] = False
            if working:
                self._gather()
        self._account.note(at_s, name, "leaves", self._now_s - before_s)

    def _take_in(self) -> None:
        """Restart from the checkpoint just written, if that lets in more work than it costs before the next failure."""
        waiting = int((self._present & ~self._working).sum())
        if waiting * self._between_failures_s > self._costs.restart_s * max(1, int(self._working.sum())):
            self._pass_until(self._now_s + self._costs.restart_s, again_s=self._costs.restart_s)
            self._gather()

    def _take_over(self, rank: int) -> float:
        """Make the step in which `rank` left; return what it would have taken."""
        training = self._training
        assert isinstance(training, FollowingSpeeds)
        usual_s = float(training.block(self._attempts + 1, 1, self._now_s).wall_s[0])
        block = training.take_over(self._attempts + 1, rank, self._now_s, self._costs.regroup_s)
        self._present[rank] = False
        self._account.commit(block, self._present, training.shares, self._now_s)
        self._step, self._attempts = self._step + 1, self._attempts + 1
        self._now_s += float(block.wall_s[0])
        self._gather()
        training.commit(block, self._now_s)
        return usual_s

    def _gather(self) -> None:
        """Train with whoever is there."""
        self._working = self._present.copy()
        if not self._present.any():
            self._training = None
        elif self._training is not None and self._way != "ragtag, restarting":
            self._training.attend(self._present)
        elif self._way in ("ragtag", "ragtag, restarting"):
            if self._training is not None:
                self._decisions.extend(self._training.decisions)
            # Who starts again knows nothing of before.
            self._training = FollowingSpeeds(self._cluster, self._present)
        else:
            self._training = EqualBatches(self._cluster, drop_slowest=self._way == "dropping stragglers")
            self._training.attend(self._present)

    def _pass_until(self, at_s: float, *, again_s: float = 0.0) -> None:
        """Let time pass in which nothing is computed; who leaves meanwhile makes it last `again_s` from then on."""
        while self._changes and self._changes[0].at_s <= at_s:
            change = self._changes.popleft()
            self._idle(change.at_s)
            if bool(self._present[change.rank]) != change.joins:
                self._present[change.rank] = change.joins
                what = "joins" if change.joins else "leaves"
                self._account.note(change.at_s, self._cluster.devices[change.rank].name, what, 0.0)
                at_s = at_s if change.joins else max(at_s, change.at_s + again_s)
        self._idle(at_s)

    def _idle(self, at_s: float) -> None:
        if at_s > self._now_s:
            self._account.idle(at_s - self._now_s, self._present, self._attempts + 1)
            self._now_s = at_s
