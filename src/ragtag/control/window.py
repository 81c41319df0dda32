"""A rank's levels (seconds a sample) since its speed last changed, in order of time and, beside it, in order of size.

The one idea: a step replaces one level of a sorted row, so averages and medians of the whole window and of its newest
part need no sorting, and a step costs the same however noisy it is.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec

from ragtag.control.robust import appended

WINDOW = 128
"""Most steps that a speed is averaged over."""
RECENT = 40
"""Most newest steps that are compared with those before them."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """At most `WINDOW` levels."""

    levels: tuple[float, ...] = ()
    """In order of time, newest last."""
    ordered: tuple[float, ...] = ()
    """The same from least to greatest."""
    recent: tuple[float, ...] = ()
    """The newest `RECENT` of them from least to greatest."""

    def append(self, level: float) -> "Window":
        """Return the window with one more level, and without the oldest one if it would be too long."""
        levels = self.levels
        size = len(levels)
        return Window(
            levels=appended(levels, level, WINDOW),
            ordered=_exchange(self.ordered, levels[0] if size == WINDOW else None, level),
            recent=_exchange(self.recent, levels[-RECENT] if size >= RECENT else None, level),
        )


def window_of(levels: Sequence[float]) -> Window:
    """Return the window of `levels`, newest last."""
    newest = tuple(levels[-WINDOW:])
    return Window(levels=newest, ordered=tuple(sorted(newest)), recent=tuple(sorted(newest[-RECENT:])))


def _exchange(ordered: tuple[float, ...], old: float | None, new: float) -> tuple[float, ...]:
    values = list(ordered)
    if old is not None:
        del values[bisect_left(values, old)]
    insort(values, new)
    return tuple(values)
