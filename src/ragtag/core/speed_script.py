"""The speed that a cluster file says a device has in a step: its own, drifting from point to point, or flipping.

The one idea: emulation and simulation follow the same script, so that one can be checked against the other.
"""

from itertools import pairwise

from ragtag.core.cluster import Device, DriftPoint


def speed_at(device: Device, step: int) -> float:
    """Return the device's speed in `step` (from 1), without jitter."""
    if device.flip is not None and (step - 1) // device.flip.period % 2:
        return device.flip.speed
    points = (DriftPoint(step=0, speed=device.speed), *device.drift)
    if step >= points[-1].step:
        return points[-1].speed
    for point, following in pairwise(points):
        if point.step <= step < following.step:
            if device.drift_kind == "step":
                return point.speed
            part = (step - point.step) / (following.step - point.step)
            return point.speed + part * (following.speed - point.speed)
    return device.speed
