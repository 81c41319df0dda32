"""Whether a rank's newest steps are at another level than those before, and quickly where they are not.

The one idea: the window ordered by size says between which values every average of a part of it lies, so that most
comparisons need no average at all. The quick answer is only ever "no change", and only where the full one is the same.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from ragtag.control.robust import log_ratio, median, midmean_of_ordered, upper_quartile_of_ordered
from ragtag.control.window import RECENT, Window

_NEWEST = (2, 3, 4, 6, 10, 20, RECENT)
"""Numbers of newest steps that are compared with those before them."""
_FEW = {2: 3.0, 3: 1.0, 4: 1.0}
"""Standard deviations that each of so few newest steps must be off."""
_MORE_STEPS = 25.0
"""Square of how many standard errors the median of three or more newest steps must be off."""
_MEDIAN = 1.57
"""A median of normal values varies that much more than their mean."""
_NEWEST_OF_FEW = 6
"""Comparisons of up to so many steps are mostly settled together."""
_QUICK = 1 - 1e-6
"""Part of a threshold that the quick answer uses: rounding moves an average by 1e-14 of itself, a threshold by less
than 1e-12."""


class Change(NamedTuple):
    """A new level."""

    newest: int
    """How many of the newest steps are at it."""
    faster: bool


class _Comparison(NamedTuple):
    """The newest steps against those before, for one size of window. Places count from an end of the ordered window."""

    newest: int
    older: int
    low: int
    """The average of the older steps is at least the value at this place from the least,"""
    high: int
    """and at most the value at this place from the greatest, whichever steps of the window they are."""
    middle: int
    """What the newest reach together is between the values at this place from the least and from the greatest."""
    deviations: float
    """Standard deviations of one step that the newest must be off."""
    with_fewer: bool = False
    """Stands for this comparison and all of fewer steps: where it cannot find a change, none of them can."""


def find_change(window: Window, noise: float, *, patience: int, flapping: bool) -> Change | None:
    """Return the change in `window` with the fewest newest steps; None: there is none.

    `noise` is the relative standard deviation of one step. Fewer than `patience` steps are not believed to be faster.
    The older steps of a `flapping` rank are averaged by their upper quartile, of others by their midmean.
    """
    average = upper_quartile_of_ordered if flapping else midmean_of_ordered
    for comparison in reversed(_suspects(window, noise, patience, flapping)):
        change = _compare(window.levels, comparison, noise * noise, average)
        if change and (not change.faster or change.newest >= patience):
            return change
    return None


def _suspects(window: Window, noise: float, patience: int, flapping: bool) -> list[_Comparison]:
    """Return the comparisons that may find a change, those of most steps first; mostly there are none."""
    average = upper_quartile_of_ordered if flapping else midmean_of_ordered
    ordered, part = window.ordered, window.recent
    suspects = []
    for comparison in _comparisons(len(ordered), flapping):
        newest, older, low, high, middle, deviations, with_fewer = comparison
        margin = noise * deviations
        # log_ratio(a, b) > margin is a * (2 - margin) > b * (2 + margin).
        less, more = 2 - margin, 2 + margin
        slower, faster = ordered[low] * more, ordered[-1 - high] * less
        if part[-1 - middle] * less <= slower and part[middle] * more >= faster:
            if with_fewer:
                break
            continue
        if with_fewer:
            continue
        if newest < len(part):
            # What bounds the middle of these steps bounds that of fewer, too.
            part = sorted(window.levels[-newest:])
        most, least = part[-1 - middle] * less, part[middle] * more
        # The older steps' average is least where the newest are the greatest of the window.
        not_slower = most <= slower or most <= average(ordered[:older]) * more
        if not_slower and (newest < patience or least >= faster or least >= average(ordered[newest:]) * less):
            continue
        suspects.append(comparison)
    return suspects


def _compare(
    levels: Sequence[float],
    comparison: _Comparison,
    variance: float,
    average: Callable[[Sequence[float]], float],
) -> Change | None:
    newest, older = comparison.newest, comparison.older
    base = average(sorted(levels[:older]))
    usual = log_ratio(median(levels[-newest:]), base)
    changed = usual * usual > _MORE_STEPS * _MEDIAN * variance * (1 / newest + 1 / older)
    if newest in _FEW:
        # Of few steps, each must be off, and on the same side: odd steps come in pairs now and then.
        sign = 1 if usual > 0 else -1
        least = min(sign * log_ratio(level, base) for level in levels[-newest:])
        needed = _FEW[newest]
        all_off = least > 0 and least * least > needed * needed * variance * (1 + 1 / older)
        changed = all_off and (changed or newest == 2)
    return Change(newest, usual < 0) if changed else None


@cache
def _comparisons(size: int, flapping: bool) -> tuple[_Comparison, ...]:
    """The comparisons of a window of `size` steps, those of most steps first."""
    single = [_comparison(size, newest, flapping) for newest in _NEWEST if _enough(size, newest)]
    few = [comparison for comparison in single if comparison.newest <= _NEWEST_OF_FEW]
    return (*_together(single), *reversed(single[len(few) :]), *_together(few), *reversed(few))


def _enough(size: int, newest: int) -> bool:
    return size - newest >= (3 if newest > 2 else 1)


def _comparison(size: int, newest: int, flapping: bool) -> _Comparison:
    older = size - newest
    if newest == 2:
        variances = _FEW[2] * _FEW[2] * (1 + 1 / older)
    else:
        variances = _MORE_STEPS * _MEDIAN * (1 / newest + 1 / older)
    return _Comparison(
        newest=newest,
        older=older,
        low=older - 1 - older // 4 if flapping else (older + 1) // 4,
        high=older // 4 if flapping else (older + 1) // 4,
        # Both of two must be off, and half of more.
        middle=1 if newest == 2 else (newest - 1) // 2,
        # A root may differ between hosts in its last bit, by far less than `_QUICK` leaves; what is found does not.
        deviations=_QUICK * variances**0.5,
    )


def _together(comparisons: Sequence[_Comparison]) -> tuple[_Comparison, ...]:
    if not comparisons:
        return ()
    worst = comparisons[-1]._replace(
        low=min(comparison.low for comparison in comparisons),
        high=min(comparison.high for comparison in comparisons),
        middle=min(comparison.middle for comparison in comparisons),
        deviations=min(comparison.deviations for comparison in comparisons),
        with_fewer=True,
    )
    return (worst,)
