"""In which order a stage computes the forwards and backwards of a step's micro-batches.

The one idea: one forward, one backward (Narayanan et al. 2019, "PipeDream", 1F1B): a stage with n stages after it is
n + 1 forwards ahead of its backwards and no more, which bounds what it keeps whatever the number of micro-batches.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Turn(NamedTuple):
    """What is computed next."""

    forward: bool
    """Else backward."""
    number: int
    """Of the micro-batch, from 0 on."""


def turns(num_micro_batches: int, stage: int, num_stages: int) -> Iterator[Turn]:
    """Give the turns of `stage` (from 0 on) of `num_stages`."""
    ahead = min(num_micro_batches, num_stages - stage)
    for index in range(ahead):
        yield Turn(True, index)
    for index in range(num_micro_batches):
        yield Turn(False, index)
        if index + ahead < num_micro_batches:
            yield Turn(True, index + ahead)
