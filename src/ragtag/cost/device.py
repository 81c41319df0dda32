"""What one device takes for its part of a step, in seconds and bytes, from the micro-batches that were timed on it.

The one idea: between measured sizes a curve is a straight line, beyond them it goes on with the slope that the measured
sizes show over a factor of two, and it never falls. So noise in one timing does not make more work look quicker.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import msgspec

from ragtag.core.profile import DeviceProfile, Timing


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch against its samples: straight between `sizes`, with `slope_s` a sample beyond."""

    sizes: tuple[int, ...]
    """Growing; the first is 0."""
    seconds: tuple[float, ...]
    """Never falling; the first is what a micro-batch takes however small it is."""
    slope_s: float

    def at(self, samples: int) -> float:
        """Return the seconds of a micro-batch of `samples`; 0 for none."""
        if samples <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.seconds
        index = bisect_left(sizes, samples)
        if index == len(sizes):
            return seconds[-1] + (samples - sizes[-1]) * self.slope_s
        part = (samples - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return seconds[index - 1] + part * (seconds[index] - seconds[index - 1])


def curve(device: DeviceProfile, *, recompute: bool = False) -> Curve:
    """Return `device`'s curve.

    Recompute that was not timed costs one more forward: `forward_part` of forward and backward on top.
    """
    if recompute and device.recompute_timings:
        return _curve(device.recompute_timings, 1.0)
    return _curve(device.timings, 1.0 + device.forward_part if recompute else 1.0)


@lru_cache(maxsize=16384)
def _curve(timings: tuple[Timing, ...], factor: float) -> Curve:
    sizes = [timing.samples for timing in timings]
    seconds = [factor * longest for longest in accumulate((timing.seconds for timing in timings), max)]
    # Over a factor of two, so that two neighbouring sizes whose times are mostly noise do not set a slope.
    double = next((index for index, size in enumerate(sizes) if size >= 2 * sizes[0]), len(sizes) - 1)
    start_s = 0.0
    if double > 0:
        start_s = seconds[0] - sizes[0] * _slope(sizes, seconds, 0, double)
    half = max((index for index, size in enumerate(sizes) if 2 * size <= sizes[-1]), default=0)
    slope_s = seconds[-1] / sizes[-1] if len(sizes) == 1 else _slope(sizes, seconds, half, len(sizes) - 1)
    return Curve(sizes=(0, *sizes), seconds=(min(max(start_s, 0.0), seconds[0]), *seconds), slope_s=slope_s)


def _slope(sizes: Sequence[int], seconds: Sequence[float], first: int, last: int) -> float:
    return (seconds[last] - seconds[first]) / (sizes[last] - sizes[first])


def time_s(device: DeviceProfile, samples: int, micro_batch: int, recompute: bool = False) -> float:
    """Return the seconds of forward and backward of `samples`, cut into micro-batches of `micro_batch` and a remainder.

    Never falls with `samples`. The work that does not shrink with them is `constant_s`.
    """
    return split_s(curve(device, recompute=recompute), samples, micro_batch)


def split_s(curve: Curve, samples: int, micro_batch: int) -> float:
    """Return the seconds of `samples`, in micro-batches of `micro_batch` and a remainder, on a device of that curve."""
    if samples <= micro_batch:
        return curve.at(samples)
    full, remainder = divmod(samples, micro_batch)
    return full * curve.at(micro_batch) + curve.at(remainder)


def even_s(curve: Curve, samples: int, pieces: int) -> float:
    """Return the seconds of `samples` in `pieces` micro-batches whose sizes differ by one at most."""
    size, larger = divmod(samples, pieces)
    return larger * curve.at(size + 1) + (pieces - larger) * curve.at(size)


def constant_s(device: DeviceProfile) -> float:
    """Return the seconds of a step that `device` takes whatever its share: optimizer, control, applying."""
    return device.optimizer_s + device.fixed_s


def backward_s(device: DeviceProfile, samples: int, recompute: bool = False) -> float:
    """Return the seconds of one micro-batch in which its gradients come: the time that reduction can hide behind.

    With recompute, the repeated forward is spread over the backward and counts as part of it.
    """
    forward_s = device.forward_part * curve(device).at(samples)
    return max(curve(device, recompute=recompute).at(samples) - forward_s, 0.0)


def memory_bytes(
    device: DeviceProfile, micro_batch: int, recompute: bool = False, fixed_bytes: int | None = None
) -> int | None:
    """Return the bytes that training with micro-batches of `micro_batch` samples needs; None: not measured.

    `fixed_bytes` replaces the measured fixed part, for layouts in which a device holds only a slice of it.
    """
    if device.memory is None or (recompute and device.memory.recompute_per_sample_bytes is None):
        return None
    fixed = device.memory.fixed_bytes if fixed_bytes is None else fixed_bytes
    return fixed + micro_batch * _per_sample_bytes(device, recompute)


def largest_micro_batch(device: DeviceProfile, recompute: bool = False, fixed_bytes: int | None = None) -> int | None:
    """Return the most samples of one micro-batch that fit; 0: not even one. None: nothing limits them.

    A device without a capacity, or without a memory curve, is not limited.
    """
    if device.capacity_bytes is None or device.memory is None:
        return None
    free = device.capacity_bytes - (device.memory.fixed_bytes if fixed_bytes is None else fixed_bytes)
    per_sample = _per_sample_bytes(device, recompute)
    if per_sample == 0:
        return None if free >= 0 else 0
    return max(free // per_sample, 0)


def _per_sample_bytes(device: DeviceProfile, recompute: bool) -> int:
    assert device.memory is not None, f"{device.name} has no memory curve"
    again = device.memory.recompute_per_sample_bytes
    return device.memory.per_sample_bytes if not recompute or again is None else again
