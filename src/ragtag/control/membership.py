"""The plan of a new generation, from what is known about those who are in it.

The one idea: each rank brings what it knows about itself, everybody hears everybody, and one pure function of that
makes the same plan everywhere. Nobody has to remember for others who come and go.
"""

from collections.abc import Sequence

import msgspec

from ragtag.control.memory import Memory
from ragtag.control.sharing import initial_plan, next_plan
from ragtag.core.values import Plan
from ragtag.plan.apportion import apportion

_PARTS = 1 << 20
"""Speeds are compared as whole numbers, so that all hosts compute the same shares."""


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank brings into a generation."""

    device_kind: str = ""
    level_s: float = 0.0
    """Seconds a sample takes it; 0: not known."""
    micro_batch: int | None = None
    """The most samples of one forward that it has memory for; None: any number, 0: not even one unit."""
    has_work: bool = True
    """Whether it had a share before; a newcomer is to have one."""
    pinned: int | None = None
    """Its units of a full batch where shares are pinned; None: they follow speed, or this rank is new."""
    calls: int = 0
    """How many calls of the script that all ranks make together, steps aside, it has finished."""
    answer: str = ""
    """What the last of them gave."""
    batch_size: int = 0
    """Samples of a step, which islands change as they go; 0: this rank is new."""


def memory_of(brought: Sequence[Brought]) -> Memory:
    """Return what these ranks' memory was found to hold; empty: it has always been enough.

    Where none of them could compute anything it is forgotten, so that the next step says which device has too little.
    """
    memory = tuple(each.micro_batch for each in brought)
    return () if all(most is None for most in memory) or all(most == 0 for most in memory) else memory


def plan_for(
    brought: Sequence[Brought], *, global_batch_size: int, unit: int, micro_batch: int | None, reason: str
) -> Plan:
    """Return the plan for these ranks: shares in proportion to speed, where a rank of unknown speed counts as the mean
    of its kind, or of all. Pinned shares stay in proportion to each other, and a new rank's is their mean.

    Args:
        brought: by rank.
        global_batch_size: samples of a step.
        unit: samples that are always computed together.
        micro_batch: the most samples of one forward on any rank; None: no limit.
        reason: what happened, for the plan's reason.
    """
    plan = initial_plan(
        world_size=len(brought), global_batch_size=global_batch_size, unit=unit, micro_batch=micro_batch
    )
    memory = memory_of(brought)
    able = [most != 0 for most in memory or (None,) * len(brought)]
    speeds = [wanted if can else 0.0 for wanted, can in zip(_wanted(brought), able)]
    if not any(speeds):
        speeds = [float(can) for can in able]
    fastest = max(speeds)
    weights = [int(_PARTS * speed / fastest) for speed in speeds]
    units = apportion(-(-global_batch_size // unit), weights)
    return next_plan(plan, units, micro_batch=micro_batch, memory=memory or None, reason=reason)


def _wanted(brought: Sequence[Brought]) -> list[float]:
    """How much of the work each rank should have, relative to the others."""
    pinned = [each.pinned for each in brought if each.pinned is not None]
    if pinned:
        mean = sum(pinned) / len(pinned)
        return [mean if each.pinned is None else float(each.pinned) for each in brought]
    return [_speed(each, brought) if each.has_work else 0.0 for each in brought]


def _speed(one: Brought, all_: Sequence[Brought]) -> float:
    """Samples a second."""
    if one.level_s > 0:
        return 1 / one.level_s
    known = [each for each in all_ if each.level_s > 0]
    alike = [each for each in known if each.device_kind == one.device_kind] or known
    total = 0.0
    for each in alike:
        total += 1 / each.level_s
    return total / len(alike) if alike else 1.0
