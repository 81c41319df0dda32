"""Whether this rank keeps activations or computes them again in backward: each device for itself.

The one idea: what is computed again are the same numbers, so nobody else has to know. A device whose memory does not
hold the smallest piece of work saves memory with time before its work goes to others (Chen et al. 2016, "Training Deep
Nets with Sublinear Memory Cost").
"""

from contextlib import AbstractContextManager

import torch

from ragtag.runtime.blocks import Listing, find_blocks, recomputing


class Recomputation:
    """Of one rank.

    Args:
        model: whose blocks are computed again.
        wanted: from the beginning on, never, or (None) once memory runs out.
        listed: lists its blocks, instead of `find_blocks`.
    """

    def __init__(self, model: torch.nn.Module, wanted: bool | None, listed: Listing | None = None) -> None:
        self._blocks, self.why_not = find_blocks(model, listed)
        self._allowed = wanted is not False
        self.active = bool(wanted and self._blocks)

    def begin(self) -> bool:
        """Compute activations again from now on; return whether that is new."""
        if self.active or not self._allowed or not self._blocks:
            return False
        self.active = True
        return True

    def region(self) -> AbstractContextManager[None]:
        """Around a forward that is followed by a backward."""
        return recomputing(self._blocks, active=self.active)
