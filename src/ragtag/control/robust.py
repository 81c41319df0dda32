"""Averages and differences that one odd step cannot move, in arithmetic that is the same on every host.

The one idea: only + - * / and comparisons, which IEEE 754 rounds alike everywhere; where a logarithm is wanted, its
first Pade approximant stands in.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def appended(window: tuple[T, ...], value: T, most: int) -> tuple[T, ...]:
    """Return `window` with `value` behind it, without its oldest values if it would be longer than `most`."""
    last = (value,)
    return window[1 - most :] + last


def midmean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of `values` (of all, for two): a trimmed mean, 25 % off each end."""
    return midmean_of_ordered(sorted(values))


def midmean_of_ordered(ordered: Sequence[float]) -> float:
    """Return the midmean of values that go from least to greatest."""
    drop = (len(ordered) + 1) // 4
    kept = ordered[drop : len(ordered) - drop]
    # Not `sum`, which adds floats up in another way from Python 3.12 on.
    total = 0.0
    for value in kept:
        total += value
    return total / len(kept)


def upper_quartile(values: Sequence[float]) -> float:
    """Return the value that at most a quarter of `values` is above."""
    return upper_quartile_of_ordered(sorted(values))


def upper_quartile_of_ordered(ordered: Sequence[float]) -> float:
    """Return the upper quartile of values that go from least to greatest."""
    return ordered[-1 - len(ordered) // 4]


def median(values: Sequence[float]) -> float:
    """Return the middle of `values`, or the mean of the middle two."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def log_ratio(value: float, base: float) -> float:
    """Return 2 (value - base) / (value + base), which is log(value / base) up to the third order, for positive ones."""
    return 2 * (value - base) / (value + base)
