"""What the votes say of one step to those who ask in whose time it went."""

from collections.abc import Sequence

import msgspec

from ragtag.control.ballot import Ballot
from ragtag.control.observation import forwards
from ragtag.core.values import Plan


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step; tuples are by rank, times in seconds."""

    step: int
    samples: tuple[int, ...]
    present: tuple[bool, ...]
    """Whether it computed something, and was there to measure it."""
    forwards: tuple[int, ...]
    """In how many it would have, with memory for everything."""
    fixed: tuple[tuple[float, float], ...]
    """Fixed cost of a step and of a forward, in samples."""
    compute_s: tuple[float, ...]
    data_s: tuple[float, ...]
    apply_s: tuple[float, ...]
    comm_s: float
    wall_s: float
    redo_s: tuple[float, ...]
    """These and the following as in `Ballot`."""
    host_s: tuple[float, ...]
    link_host_s: tuple[float, ...]
    link_s: tuple[float, ...]
    faults: tuple[int, ...]
    ran_out: tuple[bool, ...]
    """Whether its memory has run out in this step."""
    micro_batch: tuple[int, ...]
    """Most samples that each rank computes at a time."""


def seen_of(ballots: Sequence[Ballot], plan: Plan, *, fixed: Sequence[tuple[float, float]] = ()) -> Seen:
    """Return what blame needs of the step that `ballots`, in rank order, voted on under `plan`.

    Args:
        fixed: by rank, fixed cost of a step and of a forward in samples, where a controller knows them.
    """
    # Forwards that memory has made smaller are what may be found, so they are not expected.
    largest = max(1, *plan.micro_batch)
    return Seen(
        step=ballots[0].step,
        samples=tuple([ballot.samples for ballot in ballots]),
        present=tuple([b.samples > 0 and b.compute_s > 0 and not b.absent for b in ballots]),
        forwards=tuple([forwards(b.samples, unit=plan.unit, micro_batch=largest) for b in ballots]),
        fixed=tuple(fixed) or ((0.0, 0.0),) * len(ballots),
        compute_s=tuple([ballot.compute_s for ballot in ballots]),
        data_s=tuple([ballot.data_s for ballot in ballots]),
        apply_s=tuple([ballot.apply_s for ballot in ballots]),
        comm_s=min([ballot.exposed_s for ballot in ballots]),
        wall_s=max([b.apply_s + b.data_s + b.redo_s + b.compute_s + b.exposed_s for b in ballots]),
        redo_s=tuple([ballot.redo_s for ballot in ballots]),
        host_s=tuple([ballot.host_s for ballot in ballots]),
        link_host_s=tuple([ballot.link_host_s for ballot in ballots]),
        link_s=tuple([ballot.link_s for ballot in ballots]),
        faults=tuple([ballot.faults for ballot in ballots]),
        ran_out=tuple([ballot.fits is not None for ballot in ballots]),
        micro_batch=plan.micro_batch,
    )
