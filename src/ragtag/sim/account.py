"""Adds up what a simulated training did: samples, time, waste, and what a report shows.

The one idea: a sample counts once it is committed and stops counting when a restart loses it; time counts always.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragtag.core.decision import Decision
from ragtag.sim.block import Block
from ragtag.sim.cluster import VirtualCluster
from ragtag.sim.result import Incident, Shares, Simulated, SimulatedDevice, Steps

_SHOWN_STEPS = 24
_SHOWN_DEVICES = 64
"""Clusters larger than this have no picture of every device."""
_MOST_SHARES = 2000


class Account:
    """Sums by rank, in seconds and samples."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._solo = cluster.solo_samples_per_s
        self._present_s, self._busy_s = np.zeros(cluster.size), np.zeros(cluster.size)
        self._useful_s, self._samples = np.zeros(cluster.size), np.zeros(cluster.size, dtype=np.int64)
        self._kept = (self._useful_s.copy(), self._samples.copy(), 0)
        self._possible = 0.0
        self._lost_s = 0.0
        self._incidents: list[Incident] = []
        self._shares: list[Shares] = []
        self._last: deque[Steps] = deque(maxlen=_SHOWN_STEPS)

    def commit(self, block: Block, present: NDArray[np.bool_], shares: tuple[int, ...], now_s: float) -> None:
        """Count the steps of `block`, begun at `now_s`."""
        if self._cluster.scripted:
            for row in range(len(block)):
                self._count(block.first + row, block.committed[row], float(block.wall_s[row]), present)
        else:
            self._count(block.first, block.committed.sum(axis=0), float(block.wall_s.sum()), present)
        self._busy_s += block.compute_s.sum(axis=0)
        small = self._cluster.size <= _SHOWN_DEVICES
        if small and len(self._shares) < _MOST_SHARES and (not self._shares or self._shares[-1].shares != shares):
            self._shares.append(Shares(at_s=now_s, shares=shares))
        if small:
            self._last.extend(self._step(block, row, present) for row in range(len(block))[-_SHOWN_STEPS:])

    def idle(self, seconds: float, present: NDArray[np.bool_], step: int) -> None:
        """Count time in which nothing is computed."""
        self._count(step, np.zeros(self._cluster.size, dtype=np.int64), seconds, present)

    def keep(self, steps: int) -> None:
        """A checkpoint holds all up to now."""
        self._kept = (self._useful_s.copy(), self._samples.copy(), steps)

    def lose(self) -> int:
        """Return to the last checkpoint; return its number of steps."""
        useful_s, samples, steps = self._kept
        self._useful_s, self._samples = useful_s.copy(), samples.copy()
        return steps

    def note(self, at_s: float, device: str, what: str, lost_s: float) -> None:
        """Write down who came or went, and how much of everybody's time that cost."""
        self._lost_s += lost_s
        self._incidents.append(Incident(at_s=at_s, device=device, what=what, lost_s=lost_s))

    def result(self, name: str, wall_s: float, steps: int, decisions: Sequence[Decision]) -> Simulated:
        """Return what it came to after `wall_s` seconds."""
        samples, hours = int(self._samples.sum()), self._present_s / 3600
        prices = np.array([device.price_per_hour for device in self._cluster.devices])
        return Simulated(
            name=name,
            wall_s=wall_s,
            steps=steps,
            samples=samples,
            samples_per_s=samples / wall_s if wall_s else 0.0,
            eta=samples / self._possible if self._possible else 0.0,
            device_hours=float(hours.sum()),
            wasted_device_hours=float(hours.sum() - self._useful_s.sum() / 3600),
            lost_s=self._lost_s,
            devices=tuple(
                SimulatedDevice(
                    name=device.name,
                    host=device.host,
                    solo_samples_per_s=float(self._solo[rank]),
                    samples=int(self._samples[rank]),
                    present_s=float(self._present_s[rank]),
                    busy_s=float(self._busy_s[rank]),
                    useful_s=float(self._useful_s[rank]),
                )
                for rank, device in enumerate(self._cluster.devices)
            ),
            decisions=tuple(decisions),
            incidents=tuple(self._incidents),
            shares=tuple(self._shares),
            last_steps=tuple(self._last),
            price=float((hours * prices).sum()),
        )

    def _count(self, step: int, samples: NDArray[np.int64], seconds: float, present: NDArray[np.bool_]) -> None:
        rate = self._solo * self._cluster.speeds(step)
        self._present_s += seconds * present
        self._possible += seconds * float((rate * present).sum())
        self._useful_s += samples / rate
        self._samples += samples

    def _step(self, block: Block, row: int, present: NDArray[np.bool_]) -> Steps:
        own_s = block.compute_s[row] + np.where(present, self._cluster.apply_s, 0.0)
        wait_s = np.maximum(block.wall_s[row] - block.comm_s[row] - own_s, 0.0)
        return Steps(
            step=block.first + row,
            wall_s=float(block.wall_s[row]),
            shares=tuple(block.committed[row].tolist()),
            compute_s=tuple(block.compute_s[row].tolist()),
            wait_s=tuple(wait_s.tolist()),
            comm_s=float(block.comm_s[row]),
        )
