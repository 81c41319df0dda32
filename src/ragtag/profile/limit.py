"""The largest micro-batch that fits, found by trying: double while it fits, then halve the gap.

The one idea: trying a size must be survivable (an emulated cap, an accelerator's out-of-memory error), so the search is
over any predicate and knows nothing of memory.
"""

from collections.abc import Callable

import msgspec


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, in samples."""

    largest: int
    """Fits; 0: nothing does."""
    refused: int | None
    """The smallest size that does not fit, `largest` + 1 or the least size; None: the search ended before any did."""


def find_limit(
    fits: Callable[[int], bool], *, least: int, most: int, worth_trying: Callable[[int], bool] = lambda samples: True
) -> Limit:
    """Return the largest size in [least, most] that fits, for a predicate that is true up to some size.

    Args:
        fits: tries a size.
        least: smallest size of interest, at least 1.
        most: largest one.
        worth_trying: asked before a larger size is tried than any before; False ends the growth there.
    """
    if not fits(least):
        return Limit(largest=0, refused=least)
    largest, refused = least, None
    while largest < most and refused is None:
        size = min(2 * largest, most)
        if not worth_trying(size):
            return Limit(largest=largest, refused=None)
        if fits(size):
            largest = size
        else:
            refused = size
    while refused is not None and refused - largest > 1:
        middle = (largest + refused) // 2
        if fits(middle):
            largest = middle
        else:
            refused = middle
    return Limit(largest=largest, refused=refused)


def sizes_to_time(least: int, largest: int) -> tuple[int, ...]:
    """Return `least`, its doubles, and `largest`, growing; a double that is nearly `largest` is left out."""
    sizes, size = [], least
    while 4 * size <= 3 * largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)
