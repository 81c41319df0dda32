"""Consecutive steps that were computed at once, as rows of arrays."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ragtag.sim.cluster import Ring


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps `first`, `first` + 1, ...; rows are steps, columns ranks, times in seconds."""

    first: int
    wall_s: NDArray[np.float64]
    """By step."""
    committed: NDArray[np.int64]
    """Samples that go into the model."""
    compute_s: NDArray[np.float64]
    comm_s: NDArray[np.float64]
    """From the end of the last rank's work to the end of the step, by step."""

    def __len__(self) -> int:
        return len(self.wall_s)

    def head(self, count: int) -> "Block":
        """Return the first `count` steps."""
        return replace(
            self,
            wall_s=self.wall_s[:count],
            committed=self.committed[:count],
            compute_s=self.compute_s[:count],
            comm_s=self.comm_s[:count],
        )


def steps_of(
    first: int,
    *,
    ends_s: NDArray[np.float64],
    backward_s: NDArray[np.float64],
    ring: Ring,
    committed: NDArray[np.int64],
    compute_s: NDArray[np.float64],
) -> Block:
    """Return the steps whose ranks end their own work at `ends_s` (minus infinity: nobody waits for them).

    As in `cost/reduction.py`: the sum is complete at the latest of the times at which a bucket and all behind it have
    been around the ring, counted from when the last rank had that bucket. `backward_s` is of the last micro-batch.
    """
    last_s = ends_s.max(axis=1)
    complete_s = ring.vote_s + np.max(
        [(ends_s - parts * backward_s).max(axis=1) + left_s for parts, left_s in ring.lines], axis=0
    )
    return Block(first=first, wall_s=complete_s, committed=committed, compute_s=compute_s, comm_s=complete_s - last_s)
