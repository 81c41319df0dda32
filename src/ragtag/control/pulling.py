"""When to let ranks pull work from one another inside a step, how much, and when a rank had better not.

Planned shares follow speeds that last; what a device loses in *this* step nobody can plan. So the last part of every
rank's share goes into one pool, and whoever runs dry takes from it. All functions are pure; a wrong guess costs time,
never a sample.
"""

from collections.abc import Sequence

import msgspec

from ragtag.core.values import Plan

_LATEST_OF = ((2, 0.56), (4, 1.03), (8, 1.42), (16, 1.77), (64, 2.35), (256, 2.83))
"""Expected largest of N standard normal draws: how many standard deviations the last of N ranks is late."""
_BEGIN_GAIN, _END_GAIN = 0.05, 0.02
_LARGEST_PART = 0.75
_SLACK_UNITS = 2.0
"""Best of 0.5 to 4 in simulated steps on eight clusters of 2 to 8 ranks at 10 and 30 % noise (docs/control.md)."""
_WIDTH = 4.0
"""Standard deviations of work that are in the pool: two on either side of the mean, for everybody to end together.
Simulated steps of four ranks gained 1 to 2.5 points of eta from 4 against 2, at 10 to 20 % noise."""
_PART_STEP = 0.15
"""The part changes in steps of this, so that a noise that moves a little does not change the plan."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """How many of its last units each rank puts into the pool, and why."""

    pulled: tuple[int, ...]
    """By rank; empty: nothing is pulled."""
    predicted_gain: float = 0.0
    """Fraction of a step's time that waiting for the unluckiest rank would cost and pulling saves."""
    reason: str = ""


def choose_pool(
    plan: Plan, units: Sequence[int], noise: Sequence[float], *, pulling: bool, wanted: bool | None
) -> Pool:
    """Decide on the pool for the steps to come.

    The gain is e_N * sigma / (1 + e_N * sigma) for N ranks with work whose step times vary by sigma: the share of the
    step that everybody waits for the last one. Pulling begins above 5 % and ends below 2 %.

    Args:
        plan: the shares in force.
        units: how many units of a full batch each rank has.
        noise: relative standard deviation of a step's compute time, by rank.
        pulling: whether work is pulled now.
        wanted: True or False overrides the prediction.
    """
    working = [rank for rank, count in enumerate(units) if count > 0]
    if len(working) < 2 or wanted is False:
        return Pool(pulled=())
    weight = sum(plan.shares[rank] for rank in working)
    sigma = sum(noise[rank] * plan.shares[rank] for rank in working) / weight
    late = next((value for count, value in _LATEST_OF if len(working) <= count), _LATEST_OF[-1][1]) * sigma
    gain = late / (1 + late)
    if not wanted and gain < (_END_GAIN if pulling else _BEGIN_GAIN):
        return Pool(pulled=())
    part = min(_LARGEST_PART, _PART_STEP * max(1, int(_WIDTH * sigma / _PART_STEP + 0.999)))
    pulled = tuple(max(1, int(part * count)) if count else 0 for count in units)
    return Pool(
        pulled=pulled,
        predicted_gain=gain,
        reason=f"step times vary by {100 * sigma:.0f} %: the last {100 * part:.0f} % of each share is pulled "
        f"(predicted gain {100 * gain:.0f} %)",
    )


def claim_size(remaining: int, part: float) -> int:
    """How many units to claim at once: half of this rank's part of what remains, at least one.

    Guided self-scheduling (Polychronopoulos and Kuck 1987): large claims first, so that overheads are few; small ones
    at the end, so that all end together.

    Args:
        remaining: units left in the pool.
        part: this rank's part of the cluster's speed, 0 to 1.
    """
    return max(1, int(remaining * part / 2))


def accepts(
    *,
    rank: int,
    remaining: int,
    count: int,
    own_left_s: float,
    own_unit_s: float,
    unit_s: Sequence[float],
    planned_left: Sequence[float],
) -> bool:
    """Whether `rank` should claim `count` more units, or leave them to faster ranks.

    It declines what it would finish later than the others are done with their own work and the whole pool, and
    `_SLACK_UNITS` units of the fastest rank. The fastest rank never declines, so the pool is always drained.

    Args:
        rank: who asks.
        remaining: units left in the pool.
        count: units it would claim.
        own_left_s: seconds until this rank is done with what it has.
        own_unit_s: seconds a unit takes on this rank in this very step.
        unit_s: seconds a unit usually takes, by rank; 0 for ranks without work.
        planned_left: units outside the pool that each rank is believed to have still before it.
    """
    if unit_s[rank] <= 0:
        return False
    working = [other for other, seconds in enumerate(unit_s) if seconds > 0]
    fastest = min(working, key=lambda other: (unit_s[other], other))
    if rank == fastest:
        return True
    others = [other for other in working if other != rank]
    others_left = remaining + sum(planned_left[other] for other in others)
    drained_s = others_left / sum(1 / unit_s[other] for other in others)
    return own_left_s + count * own_unit_s <= drained_s + _SLACK_UNITS * unit_s[fastest]
