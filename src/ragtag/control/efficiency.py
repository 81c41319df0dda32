"""What part of the devices' summed speed a step makes use of.

The one idea: a device's speed is what it does while it computes, so everything else, waiting, communicating, reading
and updating, is what the figure falls short of 1 by; and a device that is given no work counts in full.
"""

from collections.abc import Sequence


def eta(samples: int, wall_s: float, sample_s: Sequence[float]) -> float:
    """Return samples/s of a step over the summed samples/s of all devices; 0: a device's speed is not known.

    Args:
        samples: of the whole step.
        wall_s: seconds that it took.
        sample_s: seconds that each device computes for one sample; 0: not known.
    """
    if wall_s <= 0 or not sample_s or min(sample_s) <= 0:
        return 0.0
    return samples / wall_s / sum(1 / seconds for seconds in sample_s)
