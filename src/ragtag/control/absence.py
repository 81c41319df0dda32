"""When a rank that is late counts as stalled, and who does its work meanwhile.

The one idea: a stalled rank is left out, not waited for. All functions are pure; ranks that see the same votes leave
out the same ranks and share their work out alike, and a wrong guess costs time, never a sample.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ragtag.control.sharing import units_per_rank
from ragtag.core.values import Plan
from ragtag.plan.apportion import apportion

_LATE = 1.1
"""Multiples of the usual step after which a rank may be left out: before, nobody waits for it."""
_OVERDUE = 2.0
"""Multiples of the usual reading and forward. With the usual one that nine of ten keep to, a log-normal spread of 30 %
passes it once in some thousands of micro-batches."""
_LEAST_STALL_S = 0.1
"""Shorter stalls are not worth a second reduction."""
_STALL_PART = 0.25
"""The same, as a part of the usual step."""
REMEMBERED = 32
"""Micro-batches from which it is known what is usual."""
_NEWEST = 3


class Passed(NamedTuple):
    """A micro-batch that reached its backward."""

    samples: int
    seconds: float
    """Reading and forward."""


def late_s(step_s: float) -> float:
    """Return how many seconds after its begin a step is late, if it usually takes `step_s`."""
    return _LATE * step_s


def usual_s(passed: Sequence[Passed], samples: int, *, fixed: float = 0.0) -> float:
    """Return the seconds that reading and forward of `samples` samples usually stay below; 0: nothing has passed yet.

    It is what nine of ten of the `passed` micro-batches (oldest first) kept to, or the median of the newest three if
    that is more: a rank that is late twice in a row has become slow, and must be waited for, or its speed would never
    be measured again.

    Args:
        passed: those of this rank, oldest first; their times are taken in proportion to their size.
        samples: size of the micro-batch in question.
        fixed: what a micro-batch costs whatever its size, in samples that could be computed in that time.
    """
    times = [each.seconds * (fixed + samples) / (fixed + each.samples) for each in passed]
    if not times:
        return 0.0
    newest = sorted(times[-_NEWEST:])
    return max(sorted(times)[-1 - len(times) // 10], newest[(len(newest) - 1) // 2])


def stalled(*, since_step_s: float, since_micro_batch_s: float, step_s: float, usual_s: float) -> bool:
    """Whether a rank that has not begun a micro-batch's backward yet is to be left out of the step.

    Both must hold: the step is late, and this micro-batch's reading and forward take twice as long as usual, and
    longer by what a second reduction is worth.

    Args:
        since_step_s: seconds since the rank began the step.
        since_micro_batch_s: seconds since it began the micro-batch.
        step_s: seconds of a usual step; 0: not known, so nothing is late.
        usual_s: see `usual_s`; 0: not known, so nothing is overdue.
    """
    if step_s <= 0 or usual_s <= 0 or since_step_s <= late_s(step_s):
        return False
    return since_micro_batch_s > max(_OVERDUE * usual_s, usual_s + max(_LEAST_STALL_S, _STALL_PART * step_s))


def units_without(plan: Plan, samples: int, absent: Collection[int]) -> tuple[int, ...]:
    """Return how many units of `samples` samples each rank has, with none for those `absent`.

    The others have them in proportion to their shares; alike where none of them has any. Where all are absent, nobody
    is left out.
    """
    weights = _weights(plan.shares, absent)
    if not absent or not any(weights):
        return units_per_rank(plan, samples)
    return apportion(-(-samples // plan.unit), weights)


def share_out(units: Sequence[int], plan: Plan, absent: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return which of the ascending `units`, lost in mid-step, each rank computes; the absent none."""
    weights = _weights(plan.shares, absent)
    counts = apportion(len(units), weights if any(weights) else [1] * len(weights))
    given, start = [], 0
    for count in counts:
        given.append(tuple(units[start : start + count]))
        start += count
    return tuple(given)


def _weights(shares: Sequence[int], absent: Collection[int]) -> list[int]:
    weights = [0 if rank in absent else share for rank, share in enumerate(shares)]
    return weights if any(weights) else [int(rank not in absent) for rank in range(len(shares))]


def runs_of(units: Sequence[int]) -> list[list[int]]:
    """Return ascending `units` as [first, last] of each run of consecutive ones: short to send."""
    runs: list[list[int]] = []
    for unit in units:
        if runs and runs[-1][1] == unit - 1:
            runs[-1][1] = unit
        else:
            runs.append([unit, unit])
    return runs


def units_of(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the units that `runs_of` was given."""
    return tuple(unit for first, last in runs for unit in range(first, last + 1))
