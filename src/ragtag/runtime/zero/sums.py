"""Sums of gradients of which each rank keeps its own slice: what `GradientSums` is to whole replicas.

The one idea: a round adds every rank's gradients at once, so nothing of a step is ever in one rank's hands alone. Where
a step does not come to its end, all ranks do all of it again.
"""

import hashlib
from collections.abc import Sequence

import torch

from ragtag.runtime.ring_cost import RingCost
from ragtag.runtime.zero.block import Block, norm_of
from ragtag.runtime.zero.rounds import Rounds


class SlicedSums:
    """Of one rank.

    Args:
        names: of the model's parameters.
        blocks: their flats.
        rounds: what fills the sums.
    """

    def __init__(self, names: Sequence[str], blocks: Sequence[Block], rounds: Rounds) -> None:
        self.names, self._blocks, self.rounds = list(names), blocks, rounds
        self.ring_cost = RingCost()
        self.launched_too_early = False

    @property
    def fingerprint(self) -> str:
        """A hash of what is summed, in its order."""
        parts = [
            (member.name, tuple(member.parameter.shape), str(member.parameter.dtype))
            for block in self._blocks
            for summed in block.summed
            for member in summed.flat.members
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def begin(self) -> None:
        """Forget the last step's gradients and start new sums."""
        self.rounds.begin_step()
        self.launched_too_early = False

    def drop(self) -> bool:
        """This rank's backward has failed: what is in the sums is worthless, on all ranks."""
        self.rounds.give_up()
        return True

    def begin_forward(self) -> None:
        """Before a micro-batch."""
        self.rounds.begin()

    def begin_backward(self, *, last: bool) -> None:
        """Before its backward."""
        self.rounds.begin_backward()

    def end_backward(self) -> None:
        """After it."""
        self.rounds.end()

    def idle_until(self, num_rounds: int) -> None:
        """Take part in rounds of the step in which this rank computes nothing, until there were `num_rounds`."""
        while self.rounds.num_begun < num_rounds:
            self.rounds.idle()

    def launch_rest(self) -> None:
        """Do nothing: everything has been launched."""

    def launch_again(self, *, overlap: bool) -> None:
        """Begin anew: all ranks do all of the step again.

        Without `overlap`, from now on gradients leave at the end of a round.
        """
        self.rounds.late = self.rounds.late or not overlap
        self.begin()

    def renew(self) -> None:
        """Begin anew: a generation that was left may still write into what it was given."""
        self.begin()

    def wait(self) -> None:
        """Wait until this rank's slices hold the sum (bounded by the group)."""
        self.rounds.wait()
        self.launched_too_early = self.rounds.too_early

    def has_gradient(self) -> bytes:
        """One bit per parameter, least significant first: did this rank see a gradient for it."""
        return self.rounds.bits.to_bytes((len(self.names) + 7) // 8, "little")

    def norm(self) -> torch.Tensor:
        """2-norm of this rank's slices, a scalar on the device."""
        return norm_of(summed for block in self._blocks for summed in block.summed)

    def non_finite(self) -> list[str]:
        """Nothing: sums are everybody's."""
        return []

    def install(self, factor: float, has_gradient: bytes) -> None:
        """Give every piece of a parameter used anywhere `factor` x the sum as its `grad`; None to the others."""
        bits = int.from_bytes(has_gradient, "little")
        for block in self._blocks:
            for summed in block.summed:
                summed.install(factor, bits)

    def close(self) -> None:
        """Take the hooks off the model."""
        self.rounds.close()
