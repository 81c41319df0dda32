"""An evaluation's forwards through a pipeline.

The one idea: some runs at a time, so that a quick stage is never far ahead of a slow one; every rank takes part in as
many rounds of them as the pipeline with most runs needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragtag.runtime.pipe.order import Turn
from ragtag.runtime.pipe.pipe import Pipe
from ragtag.runtime.pipe.traffic import Traffic

_AT_A_TIME = 4

Call = Callable[[Callable[[], Any]], Any]
"""Runs this stage's part of what it is given, and returns what that returned; None: it did not come to its end."""


def forwards(
    pipe: Pipe, runs: Sequence[int], num_most: int, one: Callable[[int, Call], None], device: torch.device
) -> None:
    """Take this stage's part of every run; a call of the group.

    Args:
        runs: those that pass this rank, in order.
        num_most: of the pipeline with most of them.
        one: does one run, with a `Call`.
        device: this rank's.
    """
    for first in range(0, num_most, _AT_A_TIME):
        part = runs[first : first + _AT_A_TIME] if pipe.takes_part else ()
        turns = [Turn(True, number) for number in range(len(part))]
        traffic = pipe.traffic(turns, backward=False, doing="passing activations of an evaluation")
        for turn, run in zip(turns, part):

            def call(whole: Callable[[], Any], turn: Turn = turn, traffic: Traffic = traffic) -> Any:
                received = None
                if not pipe.is_first:
                    parcel = traffic.receive(turn)
                    assert parcel is not None
                    received = parcel.tensor.to(device)
                ran = pipe.run(whole, received)
                if ran.handed_on is not None:
                    traffic.hand_on(ran.handed_on)
                return ran.result

            one(run, call)
        traffic.finish()
