"""How fast an emulated device is by itself, which is what a cluster's speed is compared with.

The one idea: the same step function, the same pace and the same step numbers as in the cluster, hence the same random
slowdowns; only the communication is missing.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from ragtag.emulate.pace import Pace


class SoloSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    samples: int
    wall_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples a second."""
        return self.samples / self.wall_s


def solo_speed(
    pace: Pace,
    step_function: Callable[[int], int],
    steps: int,
    *,
    first_step: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> SoloSpeed:
    """Run steps `first_step` .. `first_step + steps - 1` alone, and time them.

    Args:
        pace: the device; the first few regions it ever paces teach it when gradients come, so warm it up.
        step_function: runs one step inside the pace's regions (`plain_step` makes one); returns its samples.
        steps: how many, at least 1.
        first_step: step number to begin with.
        clock: wall clock, in seconds.
    """
    started_s = clock()
    samples = 0
    for number in range(first_step, first_step + steps):
        pace.step(number)
        samples += step_function(number)
    return SoloSpeed(samples=samples, wall_s=clock() - started_s)


def plain_step(
    pace: Pace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    micro_batches: Callable[[int], Iterable[tuple[Any, int]]],
) -> Callable[[int], int]:
    """Return a step function: micro-batches, optimizer step, gradients forgotten; each in its region.

    It serves a model that DDP has wrapped just as well, attached before it was wrapped.

    Args:
        micro_batches: for a step number, (batch, its number of samples) of each micro-batch.
    """

    def step(number: int) -> int:
        total = 0
        for batch, samples in micro_batches(number):
            with pace.forward_backward(samples):
                loss_fn(model, batch).backward()
            total += samples
        with pace.optimizer():
            optimizer.step()
        with pace.fixed():
            optimizer.zero_grad()
        return total

    return step
