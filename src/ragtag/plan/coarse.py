"""Devices that are nearly equal taken as equal, so that who takes part can be searched for among a thousand of them.

The one idea: no two devices that were measured have the same numbers, but which of them to leave out does not hang on
the last percent. Shares are found with the exact numbers afterwards.
"""

from math import log

import msgspec

from ragtag.core.profile import DeviceProfile
from ragtag.cost.device import constant_s, largest_micro_batch
from ragtag.cost.problem import Problem, solo_samples_per_s

MANY_KINDS = 100
_FINEST = 0.01
_SHORTEST_S = 1e-6


def coarse(problem: Problem) -> Problem:
    """Return `problem` with at most 100 kinds of devices; itself where there are no more.

    Devices whose speed, constant time, memory and noise differ by at most some percent become the first of them; the
    percentage is doubled until there are few enough.
    """
    kinds = {id(device): device for device in problem.alike}
    if len(kinds) <= MANY_KINDS:
        return problem
    width = _FINEST
    while True:
        first: dict[tuple[int, ...], DeviceProfile] = {}
        stands_for = {key: first.setdefault(_class(problem, device, width), device) for key, device in kinds.items()}
        if len(first) <= MANY_KINDS:
            break
        width *= 2
    ranks = tuple(
        msgspec.structs.replace(rank, device=stands_for[id(device)])
        for rank, device in zip(problem.ranks, problem.alike)
    )
    return msgspec.structs.replace(problem, ranks=ranks)


def _class(problem: Problem, device: DeviceProfile, width: float) -> tuple[int, ...]:
    speed = solo_samples_per_s(device, problem.global_batch_size, problem.model.unit)
    largest = largest_micro_batch(device)
    return (
        -1 if speed == 0 else round(log(speed) / width),
        round(log(max(constant_s(device), _SHORTEST_S)) / width),
        -1 if largest is None else round(log(1 + largest) / width),
        round(device.jitter / width),
    )
