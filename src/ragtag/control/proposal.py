"""The best shares for what is known about the ranks, and whether switching to them is worth it.

The one idea: a gain counts only if it is larger than what the noise of the speeds could fake, and if it saves more time
than the switch costs.
"""

from collections.abc import Callable, Sequence

import msgspec

from ragtag.control.moves import move_pieces
from ragtag.control.observation import forwards
from ragtag.control.predict import Cluster, predict_step_s
from ragtag.control.sharing import next_plan, units_per_rank
from ragtag.core.values import Plan
from ragtag.plan.apportion import apportion

_MICROSECONDS = 1_000_000
_NOT_NOISE = 2.25
"""Variances of the least certain rank's speed that the square of a gain must exceed."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller must keep to; tuples are by rank."""

    caps: tuple[int | None, ...] | None = None
    """Most samples a rank's memory can hold the work of; None: any number."""
    micro_batch: int | None = None
    """Largest number of samples in one forward; None: a rank's whole share."""
    memory: tuple[int | None, ...] | None = None
    """Most samples in one forward that each rank's memory holds; None: any number, 0: not even one unit."""
    switch_cost_s: float = 0.0
    """Seconds that everybody loses by a change of plan."""
    horizon_steps: int = 50
    """How long a plan is expected to stay good: a gain is counted over so many steps at most."""
    last_step: int | None = None
    """The run's last step; None: not known."""
    least_gain: float = 0.01
    """Fraction of the step time below which no plan is changed."""


def best_plan(cluster: Cluster, plan: Plan, limits: Limits, *, trying: int | None = None) -> Plan:
    """Return `plan` with the shares that end the slowest rank's work earliest, `trying` (a rank) with one unit.

    Ranks whose speed is not known get nothing, unless the others have no room. The reason is left empty.

    Raises:
        SettingError: the batch does not fit under the caps.
    """
    num_units = -(-sum(plan.shares) // plan.unit)
    caps = units_under_caps(plan, limits)
    known = [speed.known for speed in cluster.speeds]
    if not any(known):
        return _with_units(plan, apportion(num_units, [max(1, share) for share in plan.shares], caps), limits)
    extra = [int(rank == trying) for rank in range(len(caps))]
    room = [cap if ready and not more else 0 for cap, ready, more in zip(caps, known, extra)]
    if sum(room) + sum(extra) < num_units:
        room = [cap - more for cap, more in zip(caps, extra)]
    times, start = _times(cluster, plan.unit, limits), units_per_rank(plan, sum(plan.shares))

    def search(room: Sequence[int]) -> Plan:
        units = move_pieces(num_units - sum(extra), times, room, start)
        return _with_units(plan, [own + more for own, more in zip(units, extra)], limits)

    best = search(room)
    if any(cluster.presence_s):
        best = _without_costly_ranks(cluster, best, room, num_units, search)
    return best


def least_step_s(cluster: Cluster, plan: Plan, limits: Limits) -> float:
    """Return a lower bound of the slowest rank's work over all shares, whole or not, without search."""
    lines = []
    for rank, speed in enumerate(cluster.speeds):
        if speed.known:
            start = cluster.apply_s[rank] + speed.time_s(1, 1) - speed.level_s
            lines.append((start, speed.level_s))
    lines.sort()
    units_done, rate, step_s = float(sum(plan.shares)), 0.0, 0.0
    for place, (start, level_s) in enumerate(lines):
        units_done += start / level_s
        rate += 1 / level_s
        step_s = units_done / rate
        if place + 1 == len(lines) or step_s <= lines[place + 1][0]:
            break
    return step_s


def pays(cluster: Cluster, plan: Plan, gain: float, step: int, limits: Limits) -> bool:
    """Whether `gain`, a fraction of the time of a step under `plan`, is real and worth the switch after `step`."""
    if gain < limits.least_gain or gain * gain < _NOT_NOISE * _variance(cluster, plan):
        return False
    steps = limits.horizon_steps
    if limits.last_step is not None:
        steps = min(steps, limits.last_step - step)
    return gain * steps * predict_step_s(cluster, plan) > limits.switch_cost_s


def units_under_caps(plan: Plan, limits: Limits) -> list[int]:
    """Return how many units each rank has room for."""
    num_units = -(-sum(plan.shares) // plan.unit)
    caps = list(limits.caps or (None,) * len(plan.shares))
    for rank, most in enumerate(limits.memory or ()):
        caps[rank] = 0 if most == 0 else caps[rank]
    return [num_units if cap is None else min(num_units, cap // plan.unit) for cap in caps]


def _variance(cluster: Cluster, plan: Plan) -> float:
    """Relative variance of the least certain speed in use."""
    worst = 0.0
    for speed, share in zip(cluster.speeds, plan.shares):
        if share and speed.steps:
            worst = max(worst, speed.noise * speed.noise / len(speed.steps))
    return worst


def _with_units(plan: Plan, units: Sequence[int], limits: Limits) -> Plan:
    return next_plan(plan, units, micro_batch=limits.micro_batch, memory=limits.memory, reason="")


def _times(cluster: Cluster, unit: int, limits: Limits) -> list[Callable[[int], int]]:
    """Each rank's whole microseconds for a number of units."""
    slowest = max((speed for speed in cluster.speeds if speed.known), key=lambda speed: speed.level_s)

    def time_of(rank: int) -> Callable[[int], int]:
        apply_s = cluster.apply_s[rank]
        speed = cluster.speeds[rank] if cluster.speeds[rank].known else slowest
        most = limits.memory[rank] if limits.memory else None

        def time_us(units: int) -> int:
            samples = units * unit
            size = limits.micro_batch or max(1, samples)
            num_forwards = forwards(samples, unit=unit, micro_batch=min(size, most or size))
            return int((apply_s + speed.time_s(samples, num_forwards)) * _MICROSECONDS + 0.5)

        return time_us

    return [time_of(rank) for rank in range(len(cluster.speeds))]


def _without_costly_ranks(
    cluster: Cluster, best: Plan, room: Sequence[int], num_units: int, search: Callable[[Sequence[int]], Plan]
) -> Plan:
    """Take the share from ranks, one after another, as long as the others' step gets shorter without them."""
    room = list(room)
    best_s = predict_step_s(cluster, best)
    while True:
        candidates = []
        for rank, share in enumerate(best.shares):
            fewer = [0 if other == rank else cap for other, cap in enumerate(room)]
            if share and room[rank] and sum(fewer) >= num_units:
                plan = search(fewer)
                candidates.append((predict_step_s(cluster, plan), rank, plan))
        if not candidates or min(candidates, key=lambda item: item[:2])[0] >= best_s:
            return best
        best_s, rank, best = min(candidates, key=lambda item: item[:2])
        room[rank] = 0
