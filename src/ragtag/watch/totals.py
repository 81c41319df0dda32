"""What devices have done in many steps, added up.

The one idea: steps are added up by column, all of a rank's at once, so that a million of them are read in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragtag.watch.events import Step


@dataclass(slots=True)
class Totals:
    """What a device has done since it joined; times in seconds."""

    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    data_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0
    comm_s: float = 0.0
    stalled_s: float = 0.0
    """While others stood in for it."""

    def add(self, other: "Totals") -> None:
        """Add `other`'s to these."""
        self.steps += other.steps
        self.samples += other.samples
        self.compute_s += other.compute_s
        self.data_s += other.data_s
        self.wait_s += other.wait_s
        self.apply_s += other.apply_s
        self.comm_s += other.comm_s
        self.stalled_s += other.stalled_s


def sums(steps: Sequence[Step], num_ranks: int) -> list[Totals]:
    """Return by rank what was done in `steps`, which the same ranks have computed."""
    columns = [
        _column_sums([step.shares for step in steps], num_ranks),
        _column_sums([step.compute_s for step in steps], num_ranks),
        _column_sums([step.data_s for step in steps], num_ranks),
        _column_sums([step.wait_s for step in steps], num_ranks),
        _column_sums([step.apply_s for step in steps], num_ranks),
    ]
    comm_s = sum([step.comm_s for step in steps])
    found = [
        Totals(len(steps), samples, compute_s, data_s, wait_s, apply_s, comm_s)
        for samples, compute_s, data_s, wait_s, apply_s in zip(*columns)
    ]
    for step in steps:
        for rank in step.stalled:
            if rank < num_ranks:
                found[rank].stalled_s += stalled_s(step, rank)
    return found


def stalled_s(step: Step, rank: int) -> float:
    """Return the seconds of a step for which a rank that was stood in for cannot account."""
    told_s = sum(
        column[rank] for column in (step.compute_s, step.data_s, step.wait_s, step.apply_s) if rank < len(column)
    )
    return max(0.0, step.wall_s - step.comm_s - told_s)


def _column_sums(rows: Sequence[tuple[Any, ...]], num_ranks: int) -> list[Any]:
    try:
        found = list(map(sum, zip(*rows, strict=True)))
    except ValueError:  # a part of the steps does not know it
        found = list(map(sum, zip(*[row for row in rows if len(row) == num_ranks])))
    return found if len(found) == num_ranks else (found + [0] * num_ranks)[:num_ranks]
