"""What the controller sees of one step: numbers that every rank has, and has bit for bit alike.

The one idea: an observation is made from the ballots alone, never from a rank's own clock, so that controllers on all
ranks stay copies of each other without a message.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from ragtag.control.ballot import Ballot
from ragtag.core.values import Plan


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step; tuples are by rank."""

    step: int
    plan_id: str
    samples: tuple[int, ...]
    """Samples that each rank computed, wherever they were planned."""
    micro_batches: tuple[int, ...]
    """In how many forwards."""
    compute_s: tuple[float, ...]
    """Seconds in forward and backward; 0: not measured. Waiting, for data or for others, is not in it."""
    apply_s: tuple[float, ...]
    """Seconds of the optimizer: work of a rank that does not shrink with its share."""
    comm_s: float
    """Seconds that even the last rank to finish its work waited for the complete sum."""
    wall_s: float
    """Seconds of the step, the same number on all ranks."""
    add_s: tuple[float, ...] = ()
    """See `Ballot`."""
    send_s: tuple[float, ...] = ()


def forwards(samples: int, *, unit: int, micro_batch: int) -> int:
    """Return how many micro-batches `samples` samples are cut into: one a unit, or as few as `micro_batch` allows."""
    return -(-samples // (unit if unit > 1 else micro_batch))


@lru_cache(maxsize=16)
def plan_id(plan: Plan) -> str:
    """Return the plan's content hash, worked out once for a plan and not in every step."""
    return plan.id


@lru_cache(maxsize=16)
def planned_forwards(plan: Plan) -> tuple[int, ...]:
    """Return in how many micro-batches each rank computes its share of a full batch."""
    return tuple(
        forwards(share, unit=plan.unit, micro_batch=size) for share, size in zip(plan.shares, plan.micro_batch)
    )


def observe_ballots(ballots: Sequence[Ballot], plan: Plan) -> Observation:
    """Return the observation of the step that `ballots`, in rank order, voted on under `plan`.

    The step's wall time is that of the rank whose optimizer, reading, computing and waiting took longest together.
    Here is decided that a slow loader costs a rank no share: its time for data is in the wall time only, because fewer
    samples do not mend a cold cache or a slow disk, and work moved for it would have to be moved back.
    """
    samples = tuple([ballot.samples for ballot in ballots])
    # Work that was done twice says nothing about a rank's speed.
    compute_s = tuple([ballot.compute_s if ballot.fits is None else 0.0 for ballot in ballots])
    if samples == plan.shares:
        micro_batches = planned_forwards(plan)
    else:
        sizes = zip(samples, plan.micro_batch)
        micro_batches = tuple([forwards(count, unit=plan.unit, micro_batch=size) for count, size in sizes])
    return Observation(
        step=ballots[0].step,
        plan_id=plan_id(plan),
        samples=samples,
        micro_batches=micro_batches,
        compute_s=compute_s,
        apply_s=tuple([ballot.apply_s for ballot in ballots]),
        comm_s=min([ballot.exposed_s for ballot in ballots]),
        wall_s=max([b.apply_s + b.data_s + b.compute_s + b.exposed_s for b in ballots]),
        add_s=tuple([ballot.add_s for ballot in ballots]),
        send_s=tuple([ballot.send_s for ballot in ballots]),
    )
