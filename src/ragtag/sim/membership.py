"""Which devices leave and come back when: failures and repairs, and what the user scripts.

The one idea: membership does not depend on training, so the whole list is made beforehand, and every way of training
meets the same failures.
"""

import random
from collections.abc import Sequence

import msgspec


class Change(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A device comes or goes."""

    at_s: float
    rank: int
    joins: bool


def failures(
    num_devices: int, *, duration_s: float, failures_per_hour: float, repair_s: float, seed: int
) -> list[Change]:
    """Return the changes in `duration_s`, in order of time.

    Every device fails by itself, after exponentially distributed times of mean 1 / `failures_per_hour`, and is back
    `repair_s` later.
    """
    changes = []
    if failures_per_hour <= 0:
        return changes
    for rank in range(num_devices):
        draws, now_s = random.Random(f"{seed} {rank}"), 0.0
        while True:
            now_s += draws.expovariate(failures_per_hour / 3600)
            if now_s >= duration_s:
                break
            changes.append(Change(at_s=now_s, rank=rank, joins=False))
            now_s += repair_s
            if now_s < duration_s:
                changes.append(Change(at_s=now_s, rank=rank, joins=True))
    return sorted(changes)


def starts_absent(num_devices: int, changes: Sequence[Change]) -> list[bool]:
    """Return which devices are not there at first: those whose first change is that they join."""
    first: dict[int, Change] = {}
    for change in sorted(changes):
        first.setdefault(change.rank, change)
    return [rank in first and first[rank].joins for rank in range(num_devices)]
