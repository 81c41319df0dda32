"""How fast a run's loss falls with its samples: what a loss that is a little higher costs to make up for.

The one idea: over the later part of a run the loss falls by about the same amount whenever the samples grow by a
factor, so one slope against their logarithm turns a difference in loss into samples, and so into time.
"""

from collections.abc import Sequence
from math import log
from statistics import fmean

from ragtag.core.errors import SettingError

_FEWEST = 20


def loss_fall(samples: Sequence[float], losses: Sequence[float]) -> float:
    """Return S / L, where S = -dL / dln(samples) by least squares over the last two thirds, and L their mean loss.

    Args:
        samples: trained on before each loss, growing, above 0.

    Raises:
        SettingError: too few steps, or the loss does not fall.
    """
    first = len(losses) // 3
    x, y = [log(each) for each in samples[first:]], list(losses[first:])
    if len(y) < _FEWEST:
        raise SettingError(f"{len(losses)} steps are too few to see how the loss falls; {3 * _FEWEST // 2} are enough.")
    mean_x, mean_y = fmean(x), fmean(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / spread
    if slope >= 0 or mean_y <= 0:
        raise SettingError("the loss of that run does not fall, so what an outer loop costs cannot be told from it.")
    return -slope / mean_y
