"""Which plan comes next, and why: a pure state machine that is shown every step and now and then returns a decision.

The one idea: every rank runs its own copy on the same numbers, so all copies decide alike and nobody coordinates. No
clock, no randomness and no message is in here; the state is one frozen value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ragtag.control import explain
from ragtag.control.chunks import ROWS, RingStep, choose_chunks, last_rank, most_saved_s, remember, usual
from ragtag.control.memory import Memory, smaller_forwards
from ragtag.control.observation import Observation, plan_id, planned_forwards
from ragtag.control.parking import TRY_STEPS, Parked, next_try
from ragtag.control.predict import Cluster, cluster_of, observe_step, predict_step_s
from ragtag.control.proposal import Limits, best_plan, least_step_s, pays, units_under_caps
from ragtag.control.robust import median
from ragtag.control.speed import Speed
from ragtag.core.decision import Decision
from ragtag.core.errors import SettingError
from ragtag.core.values import Plan

_SETTLE_STEPS = 2
"""Steps a plan runs before it is judged: as few as a speed can be known from."""
ACHIEVED_OVER = 8
"""Steps over which it is seen what a decision has achieved."""
_REMEMBERED = 200
_CHUNKS_EVERY = 8
"""Steps between looks at who should own how much of the gradient."""
_PREDICT_EVERY = 8
"""Steps between predictions of one plan, which take a fraction of a millisecond and hardly change."""
_VERSION = 2
"""Version of `state_dict`."""


class _Trying(msgspec.Struct, frozen=True, kw_only=True):
    """A parked rank with one unit."""

    rank: int
    seen: int = 0
    """Steps in which it computed something."""
    until: int
    """The step after which the try is over in any case."""
    before: Plan
    """The plan without it."""
    before_s: float
    """Seconds of a step under that plan, without communication."""
    alone_s: float
    """Seconds it needed for one unit when it was last seen; 0: never seen."""


class _State(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    cluster: Cluster
    steps_under_plan: int = 0
    parked: tuple[Parked, ...] | None = None
    """None: no step seen yet."""
    trying: _Trying | None = None
    history: tuple[Decision, ...] = ()
    achieved_s: tuple[float, ...] = ()
    """Times of the first steps under the newest decision's plan."""
    ring: tuple[RingStep, ...] = ()
    """What the ring cost in the newest steps under the plan in force."""


class Controller:
    """Follows speeds and moves shares. `observe` each committed step on every rank, in order.

    `presence_s` is what each rank adds to everybody's step by having a share at all, where that is known (a link that
    its computing slows down, say).

    Raises:
        SettingError: caps, memory or presence of the wrong length, or the batch does not fit under the caps.
    """

    def __init__(self, plan: Plan, limits: Limits | None = None, *, presence_s: Sequence[float] = ()) -> None:
        self.limits = limits or Limits()
        world_size = len(plan.shares)
        for name, values in (("caps", self.limits.caps), ("memory", self.limits.memory), ("presence_s", presence_s)):
            if values and len(values) != world_size:
                raise SettingError(f"{name} = {tuple(values)} is not valid. Expected {world_size} numbers, one a rank.")
        self._state = _State(plan=plan, cluster=cluster_of(world_size, presence_s))
        self._predicted_s = 0.0
        if not self._fits(plan):
            best_plan(self._state.cluster, plan, self.limits)

    @property
    def plan(self) -> Plan:
        """The plan in force after the last step observed."""
        return self._state.plan

    @property
    def history(self) -> tuple[Decision, ...]:
        """The last 200 decisions, oldest first, with what they achieved."""
        return self._state.history

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """What is known about each rank's speed."""
        return self._state.cluster.speeds

    @property
    def cluster(self) -> Cluster:
        """What is known about all ranks."""
        return self._state.cluster

    @property
    def predicted_step_s(self) -> float:
        """Predicted seconds of the next step; 0: the speed of a rank that works in it is not known."""
        return self._predicted_s

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the limits as plain values that JSON can hold."""
        return {"version": _VERSION, **msgspec.to_builtins(self._state)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Go on where the controller that wrote `values` was.

        Raises:
            SettingError: the values are not those of a controller of as many ranks.
        """
        try:
            if values.get("version") != _VERSION:
                raise SettingError(
                    f"This controller state has version {values.get('version')}. Expected version {_VERSION}."
                )
            state = msgspec.convert({k: v for k, v in values.items() if k != "version"}, _State)
        except msgspec.ValidationError as error:
            raise SettingError(f"This is not the state of a controller: {error}.") from error
        ranks, expected = len(state.plan.shares), len(self.plan.shares)
        if ranks != expected:
            raise SettingError(f"This controller state is of {ranks} ranks. Expected one of {expected} ranks.")
        self._state = state

    def observe(self, seen: Observation) -> Decision | None:
        """Take in one step; return the change of plan that all ranks make before the next, or None.

        A step under another plan than the one in force still says how fast the ranks are.
        """
        state = self._state
        shares = state.plan.shares
        moved = seen.plan_id == plan_id(state.plan) and sum(seen.samples) == sum(shares) and seen.samples != shares
        state = msgspec.structs.replace(state, cluster=observe_step(state.cluster, seen, planned=not moved))
        if state.parked is None:
            idle = [rank for rank, share in enumerate(state.plan.shares) if not share]
            state = msgspec.structs.replace(state, parked=tuple(Parked(rank=rank, since=seen.step) for rank in idle))
        if seen.plan_id == plan_id(state.plan):
            state = _achieve(state, seen.wall_s)
            ring = RingStep(add_s=seen.add_s, send_s=seen.send_s, comm_s=seen.comm_s)
            state = msgspec.structs.replace(state, ring=remember(state.ring, ring))
        self._state = state
        decision = self._decide(seen) if len(state.plan.shares) > 1 else None
        if decision:
            self._adopt(decision)
        if decision or not self._predicted_s or seen.step % _PREDICT_EVERY == 0:
            self._predicted_s = self._predict()
        return decision

    def _predict(self) -> float:
        plan, cluster = self._state.plan, self._state.cluster
        working = [speed for speed, share in zip(cluster.speeds, plan.shares) if share]
        return predict_step_s(cluster, plan) if all(speed.known for speed in working) else 0.0

    def keep_to_memory(self, step: int, memory: Memory, reason: str) -> Decision:
        """Plan from the step after `step` on with what ranks' memory holds; see `Limits.memory`.

        A rank on trial is no longer: it keeps its unit, or loses it as any rank would.
        """
        self.limits = limits = msgspec.structs.replace(self.limits, memory=memory)
        old, cluster = self.plan, self._state.cluster
        plan = smaller_forwards(old, memory) if self._fits(old) else best_plan(cluster, old, limits)
        if plan.shares != old.shares:
            reason = f"{reason}; {explain.shares(old, plan)}"
        old_s, new_s = predict_step_s(cluster, old), predict_step_s(cluster, plan)
        decision = self._decision(step, "memory", plan, reason, new_s, old_s)
        self._adopt(decision)
        return decision

    def _decide(self, seen: Observation) -> Decision | None:
        state, limits, step = self._state, self.limits, seen.step
        plan, cluster = state.plan, state.cluster
        if not self._fits(plan):
            return self._change(best_plan(cluster, plan, limits), step, "over the limit of their memory")
        if state.trying:
            return self._judge_try(state.trying, seen)
        if state.steps_under_plan < _SETTLE_STEPS or not all(
            speed.known for speed, share in zip(cluster.speeds, plan.shares) if share
        ):
            return None
        return self._better_shares(step) or self._better_chunks(step) or self._due_try(step)

    def _better_shares(self, step: int) -> Decision | None:
        state, limits = self._state, self.limits
        plan, cluster = state.plan, state.cluster
        if not any(cluster.presence_s):
            # The search is linear in the batch; this bound spares it where nothing can come of it.
            rest_s = cluster.rest_s()
            now_s = rest_s + _work_s(cluster, plan)
            if not pays(cluster, plan, 1 - (rest_s + least_step_s(cluster, plan, limits)) / now_s, step, limits):
                return None
        better = best_plan(cluster, plan, limits)
        if better.shares == plan.shares:
            return None
        gain = 1 - predict_step_s(cluster, better) / predict_step_s(cluster, plan)
        return self._change(better, step) if pays(cluster, plan, gain, step, limits) else None

    def _better_chunks(self, step: int) -> Decision | None:
        state, limits = self._state, self.limits
        plan, cluster = state.plan, state.cluster
        if step % _CHUNKS_EVERY or len(state.ring) < ROWS:
            return None
        ring, now = usual(state.ring), plan.chunk_weights
        work_s = [cluster.rank_s(r, n, m, plan.unit) for r, (n, m) in enumerate(zip(plan.shares, plan.micro_batch))]
        step_s = predict_step_s(cluster, plan)
        last = last_rank(ring, work_s, now)
        if plan.shares[last] > plan.unit and len(set(now)) == 1:
            return None  # giving samples away does the same, at no cost to links
        # The search takes a few milliseconds; this bound spares it where nothing can come of it.
        if not pays(cluster, plan, most_saved_s(ring, work_s, now) / step_s, step, limits):
            return None
        half = ROWS // 2
        choice = choose_chunks(usual(state.ring[:half]), usual(state.ring[half:]), work_s, now)
        if not pays(cluster, plan, choice.saved_s / step_s, step, limits):
            return None
        better = msgspec.structs.replace(plan, chunk_weights=choice.weights, epoch=plan.epoch + 1)
        new_s = step_s - choice.saved_s
        reason = explain.owning(last, ring, work_s, plan, better, step_s, new_s)
        return self._decision(step, "chunks", better, reason, new_s, step_s)

    def _due_try(self, step: int) -> Decision | None:
        state, limits = self._state, self.limits
        if not state.parked:
            return None
        room = units_under_caps(state.plan, limits)
        step_s = _work_s(state.cluster, state.plan)
        due = []
        for entry in state.parked:
            measured = state.cluster.speeds[entry.rank].level_s > 0
            at = next_try(entry, alone_s=self._alone_s(entry.rank) if measured else None, step_s=step_s)
            if at <= step and room[entry.rank]:
                due.append((at, entry.rank, entry))
        if not due or (limits.last_step is not None and limits.last_step - step < 5 * TRY_STEPS):
            return None
        *_, entry = min(due, key=lambda item: item[:2])
        plan, cluster = state.plan, state.cluster
        speed = cluster.speeds[entry.rank]
        tried = best_plan(cluster, plan, limits, trying=entry.rank)
        alone_s = self._alone_s(entry.rank) if speed.level_s else 0.0
        reason = explain.trying(entry, speed, tried, step)
        predicted_s = predict_step_s(cluster, tried)
        decision = self._decision(step, "try", tried, reason, predicted_s, predict_step_s(cluster, plan))
        # What is known about it is old: only what it does now counts.
        fresh = Speed(
            level_s=speed.level_s,
            fixed=speed.fixed,
            jumps=speed.jumps,
            usual_jump=speed.usual_jump,
            deviations=speed.deviations,
        )
        speeds = tuple(fresh if rank == entry.rank else other for rank, other in enumerate(cluster.speeds))
        self._state = msgspec.structs.replace(
            state,
            cluster=msgspec.structs.replace(cluster, speeds=speeds),
            trying=_Trying(
                rank=entry.rank,
                until=step + 4 * TRY_STEPS,
                before=plan,
                before_s=_work_s(cluster, plan),
                alone_s=alone_s,
            ),
        )
        return decision

    def _judge_try(self, trying: _Trying, seen: Observation) -> Decision | None:
        state, limits, rank = self._state, self.limits, trying.rank
        if seen.samples[rank] and seen.compute_s[rank] > 0:
            trying = msgspec.structs.replace(trying, seen=trying.seen + 1)
            self._state = state = msgspec.structs.replace(state, trying=trying)
        took_s = seen.apply_s[rank] + seen.compute_s[rank]
        in_vain = trying.seen == 1 and took_s > trying.before_s and 0 < 0.8 * trying.alone_s <= took_s
        enough = trying.seen >= TRY_STEPS and state.cluster.speeds[rank].known
        if not in_vain and not enough and seen.step < trying.until:
            return None
        cluster, before = state.cluster, trying.before
        better = best_plan(cluster, state.plan, limits)
        gain = 1 - predict_step_s(cluster, better) / predict_step_s(cluster, before)
        if better.shares[rank] and gain < limits.least_gain:
            better = best_plan(_without(cluster, rank), state.plan, limits)
        if better.shares == state.plan.shares:
            # One unit was right: nothing to change, it just stays.
            self._state = msgspec.structs.replace(state, trying=None, parked=_other(state.parked, rank))
            return None
        return self._change(better, seen.step)

    def _change(self, plan: Plan, step: int, because: str = "") -> Decision:
        """The decision to go over to `plan`, named after the first rank that loses or gets all."""
        state = self._state
        old, cluster = state.plan, state.cluster
        old_s, new_s = predict_step_s(cluster, old), predict_step_s(cluster, plan)
        lost = [rank for rank, (had, has) in enumerate(zip(old.shares, plan.shares)) if had and not has]
        got = [rank for rank, (had, has) in enumerate(zip(old.shares, plan.shares)) if has and not had]
        if state.trying and plan.shares[state.trying.rank]:
            got = [state.trying.rank]
        if lost:
            kind, reason = "park", explain.parking(lost[0], cluster, old, plan, self._alone_s(lost[0]), old_s, new_s)
        elif got:
            kind, reason = "unpark", explain.unparking(got[0], cluster, old, plan, old_s, new_s)
        else:
            kind, reason = "shares", explain.moving(cluster, old, plan, old_s, new_s, because)
        return self._decision(step, kind, plan, reason, new_s, old_s)

    def _decision(self, step: int, kind: str, plan: Plan, reason: str, new_s: float, old_s: float) -> Decision:
        return Decision(
            step=step,
            kind=kind,
            reason=reason,
            plan=msgspec.structs.replace(plan, reason=reason),
            predicted_gain=1 - new_s / old_s if old_s > 0 else 0.0,
            predicted_step_s=new_s,
        )

    def _adopt(self, decision: Decision) -> None:
        state, plan = self._state, decision.plan
        entries = {entry.rank: entry for entry in state.parked or ()}
        tried = state.trying.rank if state.trying else None
        parked = []
        for rank, share in enumerate(plan.shares):
            entry = entries.get(rank)
            if decision.kind == "try" and rank == tried:
                parked.append(entry)
            elif share:
                continue
            elif entry and rank != tried:
                parked.append(entry)
            else:
                parked.append(Parked(rank=rank, since=decision.step, tries=entry.tries + 1 if entry else 0))
        self._state = msgspec.structs.replace(
            state,
            plan=plan,
            steps_under_plan=0,
            parked=tuple(parked),
            trying=state.trying if decision.kind == "try" else None,
            history=(*state.history, decision)[-_REMEMBERED:],
            achieved_s=(),
            ring=(),
        )

    def _alone_s(self, rank: int) -> float:
        """Seconds of work of `rank` with one unit."""
        unit = self.plan.unit
        return self._state.cluster.rank_s(rank, unit, unit, unit)

    def _fits(self, plan: Plan) -> bool:
        limits = self.limits
        in_reach = all(share == 0 or most != 0 for share, most in zip(plan.shares, limits.memory or ()))
        return in_reach and all(cap is None or share <= cap for share, cap in zip(plan.shares, limits.caps or ()))


def _achieve(state: _State, wall_s: float) -> _State:
    """Count a step under the plan in force, and put the median of its first steps beside what was predicted."""
    history, achieved_s = state.history, state.achieved_s
    if history and len(achieved_s) < ACHIEVED_OVER:
        achieved_s = (*achieved_s, wall_s)
        newest = msgspec.structs.replace(history[-1], achieved_step_s=median(achieved_s), achieved_over=len(achieved_s))
        history = (*history[:-1], newest)
    return msgspec.structs.replace(
        state, steps_under_plan=state.steps_under_plan + 1, history=history, achieved_s=achieved_s
    )


def _work_s(cluster: Cluster, plan: Plan) -> float:
    """Usual seconds of the slowest rank's work under `plan`."""
    forwards = planned_forwards(plan)
    ranks = zip(cluster.apply_s, cluster.speeds, plan.shares, forwards)
    return max([apply_s + speed.time_s(share, count) for apply_s, speed, share, count in ranks])


def _without(cluster: Cluster, rank: int) -> Cluster:
    speeds = tuple(Speed() if other == rank else speed for other, speed in enumerate(cluster.speeds))
    return msgspec.structs.replace(cluster, speeds=speeds)


def _other(parked: tuple[Parked, ...] | None, rank: int) -> tuple[Parked, ...]:
    return tuple(entry for entry in parked or () if entry.rank != rank)
