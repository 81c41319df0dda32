"""Ranks without a share: since when, and when they are worth another try.

The one idea: a try costs what the rank is late by, and the time until the next try is chosen so that tries cost at most
a fixed fraction of the run, however slow the rank is; each try in vain doubles it.
"""

import msgspec

COST_OF_TRIES = 0.03
"""Largest part of a run's time that trying one parked rank may take."""
TRY_STEPS = 2
"""Steps of a try: the fewest from which a change of speed can be told."""
FEWEST_STEPS = 20
_FIRST_MEASUREMENT_STEPS = 3
_MOST_DOUBLINGS = 5


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has no share."""

    rank: int
    since: int
    """The step after which it lost its share or was last tried."""
    tries: int = 0
    """How often it was tried in vain."""


def next_try(parked: Parked, *, alone_s: float | None, step_s: float) -> int:
    """Return the step after which `parked` is tried, as things are now.

    With the least share it needs `alone_s` (None: nobody knows, it never had one) where the others' step takes
    `step_s`: the faster it is compared with them, the sooner.
    """
    if alone_s is None:
        return parked.since + _FIRST_MEASUREMENT_STEPS
    late_s = max(alone_s - step_s, 0.0)
    affordable = int(TRY_STEPS * late_s / (COST_OF_TRIES * step_s)) + 1 if step_s > 0 else FEWEST_STEPS
    return parked.since + max(FEWEST_STEPS, affordable) * 2 ** min(parked.tries, _MOST_DOUBLINGS)
