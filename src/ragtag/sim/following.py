"""ragtag's own way of training: the production controller and pool on virtual devices.

The one idea: the controller is shown every step in small clusters, and in large ones only where something may happen:
some steps after each change and then one in 50. A device that is not there is a rank with room for no sample.
"""

from collections.abc import Collection, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from ragtag.control.absence import late_s, stalled, units_without
from ragtag.control.controller import Controller
from ragtag.control.observation import Observation, plan_id
from ragtag.control.pool_trial import STEPS, PoolTrial
from ragtag.control.proposal import Limits
from ragtag.control.pulling import choose_pool
from ragtag.control.sharing import Start, initial_plan, samples_of_units, units_per_rank
from ragtag.core.decision import Decision
from ragtag.sim.block import Block, steps_of
from ragtag.sim.cluster import VirtualCluster
from ragtag.sim.pulled import drain, play_claims

_ALWAYS_WATCHED = 64
"""Up to so many devices every step is shown to the controller."""
_WATCHED_STEPS = 3
_FIRST_STEPS = 12
_STRIDE = 50
_FORWARD = 1 / 3
"""Forward's part of forward and backward."""
_CLAIMS_PLAYED = 16
"""Up to so many ranks with work every claim is played through."""
_LEAST_COMPARED = 8
"""As in `runtime/run.py`: noise is a guess until so many steps were compared with their neighbours."""


class FollowingSpeeds:
    """Production's decisions, step by step. `attend` before the first step and at each change of membership."""

    def __init__(self, cluster: VirtualCluster, present: NDArray[np.bool_]) -> None:
        self._cluster = cluster
        limits = Limits(micro_batch=cluster.micro_batch, memory=cluster.memory, caps=_caps(present))
        plan = initial_plan(
            world_size=cluster.size,
            global_batch_size=cluster.batch,
            unit=cluster.unit,
            micro_batch=cluster.micro_batch,
            caps=_caps(present),
            start=Start(micro_batch=cluster.memory),
        )
        self._controller = Controller(plan, limits)
        self._plan = plan
        self._trial = PoolTrial()
        self._base_of: tuple[int, ...] = ()
        self._watch = _FIRST_STEPS
        self._usual_step_s = 0.0
        self._back_at_s: dict[int, float] = {}
        self._gone = frozenset()
        self.attend(present)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the controller decided, with what came of it; the last 200."""
        return self._controller.history

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples by rank in the next step."""
        return self._plan.shares

    def attend(self, present: NDArray[np.bool_]) -> None:
        """Go on with the ranks that are `present`: the others get no sample from the next observed step on."""
        self._present = present.copy()
        self._gone = frozenset(np.flatnonzero(~present).tolist())
        self._controller.limits = msgspec.structs.replace(self._controller.limits, caps=_caps(present))
        self._ring = self._cluster.ring(present)
        self._watch = max(self._watch, _WATCHED_STEPS)

    def block(self, first: int, most: int, now_s: float) -> Block:
        """Return the next steps: one where the controller is to see it, else up to 50."""
        stalls_s = self._cluster.stalls_s(first)
        away = {rank for rank, back_s in self._back_at_s.items() if back_s > now_s}
        away |= {rank for rank, share in enumerate(self._plan.shares) if share and rank in self._gone}
        count = 1 if self._watching or stalls_s or away else min(most, self._trial_left or _STRIDE)
        shares = np.array(self._plan.shares)
        if away:
            units = units_without(self._plan, self._cluster.batch, away)
            shares = np.array(samples_of_units(units, self._cluster.batch, self._cluster.unit))
        factors = self._cluster.factors(first, count, shares.tolist())
        block = self._quiet(first, shares, factors, pulling=bool(self._plan.pulled) and not away)
        return self._with_stalls(block, stalls_s, now_s) if stalls_s else block

    def take_over(self, first: int, rank: int, now_s: float, regroup_s: float) -> Block:
        """Return the step in which `rank` died: the others do its work on top of their own, and all reduce again."""
        return self._without(
            self.block(first, 1, now_s).head(1), {rank}, extra_s=regroup_s + self._ring.all_s + self._ring.vote_s
        )

    def commit(self, block: Block, now_s: float) -> None:
        """Show the block's last step to the controller, `now_s` being the block's end, and follow what it decides."""
        self._usual_step_s = float(block.wall_s[-1])
        samples = tuple(block.committed[-1].tolist())
        decision = self._controller.observe(
            Observation(
                step=block.first + len(block) - 1,
                plan_id=plan_id(self._controller.plan),
                samples=samples,
                micro_batches=self._cluster.forwards(samples),
                compute_s=tuple(block.compute_s[-1].tolist()),
                apply_s=tuple(np.where(self._present, self._cluster.apply_s, 0.0).tolist()),
                comm_s=float(block.comm_s[-1]),
                wall_s=self._usual_step_s,
            )
        )
        self._watch = max(self._watch - 1, _WATCHED_STEPS if decision else 0)
        pulled, pool = bool(self._plan.pulled), self._pool()
        # A trial compares all of its steps, of which the controller need not see each.
        for index in range(0 if self._trial_left else len(block) - 1, len(block)):
            self._trial = self._trial.observe(
                step=block.first + index, wall_s=float(block.wall_s[index]), pulled=pulled, wanted=bool(pool)
            )
        self._plan = msgspec.structs.replace(self._controller.plan, pulled=pool if self._trial.pulls else ())

    @property
    def _trial_left(self) -> int:
        """Steps until a trial of pulling changes over or ends; 0: none is under way."""
        trial = self._trial
        if trial.kept or not trial.under_way:
            return 0
        return STEPS - len(trial.pulled_s if trial.pulls else trial.plain_s)

    @property
    def _watching(self) -> bool:
        return self._watch > 0 or self._cluster.scripted or self._cluster.size <= _ALWAYS_WATCHED

    def _pool(self) -> tuple[int, ...]:
        plan, speeds = self._controller.plan, self._controller.speeds
        working = [speed for speed, share in zip(speeds, plan.shares) if share]
        if not all(speed.level_s > 0 and len(speed.jumps) >= _LEAST_COMPARED for speed in working):
            return ()
        noise = [speed.noise if share else 0.0 for speed, share in zip(speeds, plan.shares)]
        units = units_per_rank(plan, self._cluster.batch)
        return choose_pool(plan, units, noise, pulling=self._trial.under_way, wanted=None).pulled

    def _quiet(self, first: int, shares: NDArray[np.int64], factors: NDArray[np.float64], *, pulling: bool) -> Block:
        """Steps in which nobody stalls or dies."""
        base_s, backward_s = self._base_work(shares)
        apply_s = np.where(self._present, self._cluster.apply_s * factors, 0.0)
        committed = np.broadcast_to(shares, factors.shape)
        compute_s = base_s * factors
        if pulling:
            committed, compute_s = self._pulled(shares, base_s, factors, apply_s)
        return steps_of(
            first,
            ends_s=apply_s + compute_s + self._cluster.reading_s * committed,
            backward_s=backward_s * factors,
            ring=self._ring,
            committed=committed,
            compute_s=compute_s,
        )

    def _base_work(self, shares: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        key = tuple(shares.tolist())
        if self._base_of != key:
            self._base_of, self._base = key, self._cluster.work_s(key)
        return self._base

    def _pulled(
        self,
        shares: NDArray[np.int64],
        base_s: NDArray[np.float64],
        factors: NDArray[np.float64],
        apply_s: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        unit, batch = self._cluster.unit, self._cluster.batch
        pulled, units = np.array(self._plan.pulled), np.array(units_per_rank(self._plan, batch))
        pool = int(pulled.sum())
        planned_s, _ = self._cluster.work_s(np.maximum(shares - pulled * unit, 0).tolist())
        working = shares > 0
        unit_s = np.where(working, (base_s - planned_s) / np.maximum(pulled, 1), np.inf)
        if working.sum() > _CLAIMS_PLAYED:
            counts, ends_s = drain(
                np.where(working, apply_s + planned_s * factors, np.inf),
                np.where(working, unit_s * factors, 1.0),
                pool,
            )
            return _samples(units - pulled + counts, batch, unit), np.where(working, ends_s - apply_s, 0.0)
        committed, compute_s = np.zeros(factors.shape, dtype=np.int64), np.zeros(factors.shape)
        ranks = np.flatnonzero(working)
        usual = [self._controller.speeds[rank].level_s * unit for rank in ranks]
        for row, factor in enumerate(factors):
            planned = (units - pulled)[ranks]
            own_s = (unit_s * factor)[ranks]
            # What does not grow with the units is done before the first one.
            start_s = (apply_s[row] + planned_s * factor)[ranks] - planned * own_s
            done, ends_s = play_claims(planned.tolist(), pool, start_s.tolist(), own_s.tolist(), usual)
            committed[row, ranks], compute_s[row, ranks] = done, np.array(ends_s) - apply_s[row, ranks]
        return _samples(committed, batch, unit), compute_s

    def _with_stalls(self, block: Block, stalls_s: Mapping[int, float], now_s: float) -> Block:
        """Stand-ins for ranks that stall longer than is waited for; the others wait out the rest."""
        compute_s, absent = block.compute_s.copy(), set()
        for rank, seconds in stalls_s.items():
            usual_s = self._usual_step_s or float(block.wall_s[0])
            forward_s = _FORWARD * float(block.compute_s[0, rank])
            left_out = seconds > late_s(usual_s) and stalled(
                since_step_s=seconds, since_micro_batch_s=seconds, step_s=usual_s, usual_s=forward_s
            )
            if left_out and self._present[rank]:
                absent.add(rank)
                self._back_at_s[rank] = now_s + seconds
            else:
                compute_s[0, rank] += seconds
        # Whoever stalls has computed nothing of its last micro-batch: nothing of the reduction is hidden.
        waited = steps_of(
            block.first,
            ends_s=np.where(self._present, self._cluster.apply_s, 0.0) + compute_s,
            backward_s=np.zeros(self._cluster.size),
            ring=self._ring,
            committed=block.committed,
            compute_s=compute_s,
        )
        if not absent:
            return waited
        over_s = max(0.0, late_s(self._usual_step_s) - float(waited.wall_s[0]))
        return self._without(waited, absent, extra_s=over_s + self._ring.all_s + self._ring.vote_s)

    def _without(self, block: Block, absent: Collection[int], extra_s: float) -> Block:
        """Take from one step what `absent` ranks computed, and let the others compute it afterwards."""
        before = block.committed[0]
        total = int(before.sum())
        keep = np.array([rank not in absent and rank not in self._gone for rank in range(len(before))])
        lost = int(before[~keep].sum())
        weights = np.where(keep, np.array(self._plan.shares), 0)
        plan = msgspec.structs.replace(self._plan, shares=tuple(weights.tolist()))
        more = np.array(samples_of_units(units_without(plan, lost, ()), lost, plan.unit))
        samples = np.where(keep, before, 0) + more
        assert int(samples.sum()) == total, "the others do all that was lost"
        more_s = np.where(more > 0, block.compute_s[0] / np.maximum(before, 1) * more, 0.0)
        compute_s = np.where(keep, block.compute_s[0] + more_s, 0.0)
        return Block(
            first=block.first,
            wall_s=block.wall_s[:1] + more_s.max() + extra_s,
            committed=samples[None, :],
            compute_s=compute_s[None, :],
            comm_s=block.comm_s + extra_s,
        )


def _samples(units: NDArray[np.int64], batch: int, unit: int) -> NDArray[np.int64]:
    """Samples of units by step (rows) and rank; the last unit of the batch may be short."""
    samples = units * unit
    short = -batch % unit
    if short:
        last = samples.shape[1] - 1 - (samples[:, ::-1] > 0).argmax(axis=1)
        samples[np.arange(len(samples)), last] -= short
    return samples


def _caps(present: NDArray[np.bool_]) -> tuple[int | None, ...]:
    return tuple(None if here else 0 for here in present)
