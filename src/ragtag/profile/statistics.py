"""What repeated measurements say: medians, because disturbances only ever add time, and how far they spread.

The one idea: half the middle 90 % is reported as the spread, so that one interrupted repetition counts in neither.
"""

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from statistics import median

_PER_DEVIATION = 1.4826
"""A normal distribution's standard deviation in units of its median absolute deviation."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median in units of that of a mean: sqrt(pi / 2)."""


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` of the values lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    if ordered[below] == ordered[above]:
        return ordered[below]
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def half_spread(values: Sequence[float]) -> float:
    """Return half the width of the middle 90 % of the values."""
    return (quantile(values, 0.95) - quantile(values, 0.05)) / 2


def relative_deviation(groups: Iterable[Sequence[float]]) -> float:
    """Return by how much repetitions of the same work differ, over all groups of such: a relative standard deviation.

    Robust: from the median absolute deviation of the logarithms of value / (median of its group). Each group costs a
    degree of freedom. Groups of fewer than 3 say nothing; without any, 0.
    """
    usable = [group for group in groups if len(group) >= 3 and min(group) > 0]
    ratios = [abs(log(value / median(group))) for group in usable for value in group]
    if not ratios:
        return 0.0
    freedom = len(ratios) / (len(ratios) - len(usable))
    return exp(_PER_DEVIATION * median(ratios) * sqrt(freedom)) - 1


def is_precise(values: Sequence[float], part: float) -> bool:
    """Return whether the standard error of the values' median is at most `part` of it, by their own scatter."""
    middle = median(values)
    if len(values) < 2 or middle <= 0:
        return False
    deviation = _PER_DEVIATION * median(abs(value - middle) for value in values)
    return _MEDIAN_ERROR * deviation / sqrt(len(values)) <= part * middle
