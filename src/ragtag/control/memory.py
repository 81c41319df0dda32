"""What each rank's memory holds, learnt from the times it ran out, and plans that keep to it.

The one idea: how much fitted stands on the ballots of the step in which it was found out, so all ranks learn the same
from them and change to the same plan. A limit only ever falls: what did not fit once is not tried again in this run.
"""

from collections.abc import Sequence

import msgspec

from ragtag.control import explain
from ragtag.control.absence import units_without
from ragtag.control.ballot import Ballot
from ragtag.control.sharing import next_plan
from ragtag.core.decision import Decision
from ragtag.core.values import Plan

Memory = tuple[int | None, ...]
"""By rank, the most samples in one forward that its memory holds; None: any number, 0: not even one unit."""


def smaller(samples: int, *, unit: int, by_unit: bool) -> int:
    """Return how many samples to try in one forward when `samples` did not fit: half of them, in whole units.

    0: there is nothing smaller, because a unit is always computed `by_unit`, or because it was one sample.
    """
    return 0 if by_unit else samples // 2 // unit * unit


def learn(known: Memory, ballots: Sequence[Ballot], plan: Plan) -> Memory:
    """Return what is known after a step that all ranks agreed on; `known` may be empty.

    Never that nobody can compute anything: the step was computed, so whoever did some of it can do one unit.
    """
    memory = tuple(
        before if ballot.fits is None else min(ballot.fits, ballot.fits if before is None else before)
        for before, ballot in zip(known or (None,) * len(ballots), ballots)
    )
    if any(most != 0 for most in memory):
        return memory
    return tuple(plan.unit if ballot.samples else 0 for ballot in ballots)


def why(before: Memory, after: Memory, plan: Plan) -> str:
    """Return one line on what was learnt in a step under `plan`."""
    parts = []
    for rank, (old, new) in enumerate(zip(before or (None,) * len(after), after)):
        if old == new:
            continue
        if new == 0:
            held = explain.samples(plan.unit)
            parts.append(f"rank {rank} ran out of memory with {held}, the least there is: no work for it from now on")
        elif old == 0:
            parts.append(f"rank {rank} works again, with {explain.samples(plan.unit)} at a time: nobody else can")
        else:
            parts.append(
                f"rank {rank} ran out of memory: at most {explain.samples(new or 0)} in one forward from now on, "
                f"{plan.micro_batch[rank]} before"
            )
    return "; ".join(parts)


def smaller_forwards(plan: Plan, memory: Memory) -> Plan:
    """Return `plan` with the same shares, computed in pieces that memory holds."""
    sizes = tuple(min(size, most or size) for size, most in zip(plan.micro_batch, memory))
    return msgspec.structs.replace(plan, micro_batch=sizes, epoch=plan.epoch + 1)


def within(plan: Plan, memory: Memory, *, micro_batch: int | None) -> Plan:
    """Return `plan` with what memory holds: its shares, but for those of ranks that can do nothing."""
    unable = {rank for rank, most in enumerate(memory) if most == 0}
    if not any(plan.shares[rank] for rank in unable):
        return smaller_forwards(plan, memory)
    units = units_without(plan, sum(plan.shares), unable)
    return next_plan(plan, units, micro_batch=micro_batch, memory=memory, reason=plan.reason)


def decide(step: int, plan: Plan, memory: Memory, reason: str, *, micro_batch: int | None) -> Decision:
    """Return the change of plan of ranks whose shares follow nothing; see `Controller.keep_to_memory` for others."""
    after = within(plan, memory, micro_batch=micro_batch)
    if after.shares != plan.shares:
        reason = f"{reason}; {explain.shares(plan, after)}"
    return Decision(
        step=step,
        kind="memory",
        reason=reason,
        plan=msgspec.structs.replace(after, reason=reason),
        predicted_gain=0.0,
        predicted_step_s=0.0,
    )
