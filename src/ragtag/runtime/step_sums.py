"""What a step asks of sums of gradients, whoever holds them: whole on every rank, or in slices."""

from typing import Protocol

import torch

from ragtag.runtime.ring_cost import RingCost


class StepSums(Protocol):
    """The sums of one rank's gradients, and of all ranks', of one step after another."""

    ring_cost: RingCost
    launched_too_early: bool
    """A gradient came after what it belongs to had left."""

    @property
    def fingerprint(self) -> str:
        """A hash of what is summed."""
        ...

    def begin(self) -> None:
        """Forget the last step's gradients and start new sums."""
        ...

    def drop(self) -> bool:
        """Throw away what a backward that failed has spoilt; return whether anything was launched."""
        ...

    def renew(self) -> None:
        """Take new memory for what travels: a generation that was left may still write into the old one."""
        ...

    def begin_forward(self) -> None:
        """Before a micro-batch."""
        ...

    def begin_backward(self, *, last: bool) -> None:
        """Before its backward, which is the step's `last` one of this rank, or not."""
        ...

    def end_backward(self) -> None:
        """After it."""
        ...

    def idle_until(self, num_rounds: int) -> None:
        """This rank has computed all it has to; others may compute up to `num_rounds` micro-batches."""
        ...

    def launch_rest(self) -> None:
        """Start what backward has not started."""
        ...

    def launch_again(self, *, overlap: bool) -> None:
        """Start all of it once more."""
        ...

    def wait(self) -> None:
        """Wait until the sum over ranks is complete (bounded by the group)."""
        ...

    def norm(self) -> torch.Tensor:
        """2-norm of what this rank holds of the reduced sum, a scalar on the device."""
        ...

    def has_gradient(self) -> bytes:
        """One bit per parameter: did this rank see a gradient for it."""
        ...

    def non_finite(self) -> list[str]:
        """Names of parameters whose own sum is not finite."""
        ...

    def install(self, factor: float, has_gradient: bytes) -> None:
        """Give everything that the optimizer trains and that was used anywhere `factor` x the sum as its `grad`."""
        ...

    def close(self) -> None:
        """Take hooks off the model."""
        ...
