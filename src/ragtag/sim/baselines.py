"""The ways of training that ragtag is compared with: equal batches, and equal batches without the slowest.

The one idea: both get what helps them. The number of gradients to wait for is chosen from this very cluster's times,
and checkpoints are written as often as is best for its failures (`sim/run.py`).
"""

import numpy as np
from numpy.typing import NDArray

from ragtag.control.sharing import samples_of_units
from ragtag.plan.apportion import apportion
from ragtag.sim.block import Block, steps_of
from ragtag.sim.cluster import VirtualCluster

_TRIAL_STEPS = 32
_BLOCK = 64
"""Most steps computed at once."""


class EqualBatches:
    """Equal batches, as stock DDP has them; with `drop_slowest`, the gradients of the slowest are not waited for.

    The fastest K ranks' gradients make a step (Chen et al., "Revisiting distributed synchronous SGD", 2016), K being
    what gives most samples a second in 32 steps; the others' work is thrown away. Not the gradient of one process.
    """

    def __init__(self, cluster: VirtualCluster, *, drop_slowest: bool = False) -> None:
        self._cluster, self._batch, self._drop_slowest = cluster, cluster.batch, drop_slowest
        self.decisions: tuple = ()
        self.shares: tuple[int, ...] = ()

    def attend(self, present: NDArray[np.bool_]) -> None:
        """Go on with the ranks that are `present`; the global batch stays."""
        self._present = present.copy()
        unit = self._cluster.unit
        units = apportion(-(-self._batch // unit), present.astype(int).tolist())
        self.shares = samples_of_units(units, self._batch, unit)
        self._compute_s, self._backward_s = self._cluster.work_s(self.shares)
        self._ring = self._cluster.ring(present)
        self._waited_for = int(present.sum())
        if self._drop_slowest:
            ends_s = np.sort(self._work(1, _TRIAL_STEPS)[0], axis=1)[:, self._cluster.size - self._waited_for :]
            speeds = np.arange(1, self._waited_for + 1) / (np.median(ends_s, axis=0) + self._ring.last_s)
            self._waited_for = int(speeds.argmax()) + 1

    def block(self, first: int, most: int, now_s: float) -> Block:
        """Return the next steps, at most `most`."""
        ends_s, compute_s, factors = self._work(first, min(most, _BLOCK))
        committed = np.broadcast_to(np.array(self.shares), ends_s.shape)
        if self._waited_for < self._present.sum():
            place = self._cluster.size - int(self._present.sum()) + self._waited_for - 1
            last_s = np.partition(ends_s, place, axis=1)[:, place : place + 1]
            committed = np.where(ends_s <= last_s, committed, 0)
            compute_s = np.minimum(compute_s, last_s)
            ends_s = np.where(ends_s <= last_s, ends_s, -np.inf)
        return steps_of(
            first,
            ends_s=ends_s,
            backward_s=self._backward_s * factors,
            ring=self._ring,
            committed=committed,
            compute_s=compute_s,
        )

    def commit(self, block: Block, now_s: float) -> None:
        """Nothing is learnt."""

    def _work(self, first: int, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """When each rank is done (minus infinity for those that are not there), what it computed, and its luck."""
        factors = self._cluster.factors(first, count, self.shares)
        compute_s = self._compute_s * factors
        for row in range(count if self._cluster.scripted else 0):
            for rank, seconds in self._cluster.stalls_s(first + row).items():
                compute_s[row, rank] += seconds
        reading_s = self._cluster.reading_s * np.array(self.shares)
        ends_s = np.where(self._present, compute_s + self._cluster.apply_s * factors + reading_s, -np.inf)
        return ends_s, np.where(self._present, compute_s, 0.0), factors
