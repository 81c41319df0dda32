"""Devices that exist as numbers: what work costs each of them in any step, and what exchanging gradients costs all.

The one idea: the costs are those that `cost` predicts with, on the same `Problem`; only luck and the file's
script (drift, flips, stalls) are added here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ragtag.control.observation import forwards
from ragtag.core.cluster import Cluster, Device
from ragtag.core.errors import SettingError
from ragtag.core.profile import DeviceProfile, Profile
from ragtag.core.speed_script import speed_at
from ragtag.cost.comm import vote_s
from ragtag.cost.device import backward_s, constant_s, largest_micro_batch, time_s
from ragtag.cost.problem import Problem, assemble, profile_from_speeds, solo_samples_per_s
from ragtag.cost.reduction import bucket_rings_s, ready_parts
from ragtag.sim.luck import hashed_names, slowdowns


class Ring(NamedTuple):
    """What reducing takes, bucket after bucket."""

    lines: tuple[tuple[NDArray[np.float64], float], ...]
    """For each bucket: the part of each rank's last backward that is still to come when it is complete, and the seconds
    of it and all behind it."""
    vote_s: float

    @property
    def all_s(self) -> float:
        """Seconds of all buckets."""
        return max(left_s for _, left_s in self.lines)

    @property
    def last_s(self) -> float:
        """Seconds of the last bucket."""
        return min(left_s for _, left_s in self.lines)


@dataclass(frozen=True, kw_only=True)
class VirtualCluster:
    """What `virtual_cluster` makes. Arrays are by rank; seconds."""

    problem: Problem
    devices: tuple[Device, ...]
    jitter_per: str = "step"
    seed: int = 0
    micro_batch: int | None = None
    """Largest number of samples in one forward that is asked for; None: a rank's whole share."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.problem.global_batch_size

    @property
    def unit(self) -> int:
        """Samples that are always computed together."""
        return self.problem.model.unit

    @cached_property
    def memory(self) -> tuple[int | None, ...] | None:
        """Most samples in one forward that each device's memory holds; None: nothing limits any."""
        held = tuple(largest_micro_batch(rank.device) for rank in self.problem.ranks)
        return held if self.unit == 1 and any(held) else None

    @cached_property
    def jitter(self) -> NDArray[np.float64]:
        """Sigma of each device's slowdowns."""
        return np.array([rank.device.jitter for rank in self.problem.ranks])

    @cached_property
    def apply_s(self) -> NDArray[np.float64]:
        """Optimizer and other work that does not shrink with the batch."""
        return np.array([constant_s(rank.device) for rank in self.problem.ranks])

    @cached_property
    def reading_s(self) -> NDArray[np.float64]:
        """Reading one sample, where nobody reads ahead."""
        return np.array([rank.device.data_s for rank in self.problem.ranks])

    @cached_property
    def scripted(self) -> bool:
        """Whether any device drifts, flips or stalls."""
        return any(device.drift or device.flip or device.stall for device in self.devices)

    def work_s(self, samples: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return, without luck and script, the time of forward and backward of `samples` by rank, and of it the last
        micro-batch's backward."""
        known, kinds = self._known_work, self._kinds
        missing = {pair for pair in zip(kinds, samples) if pair not in known}
        for kind, count in missing:
            device = self._devices_of_kind[kind]
            size = self._size(count, largest_micro_batch(device))
            last = (count - 1) % size + 1 if count else 0
            known[kind, count] = (time_s(device, count, size), backward_s(device, last))
        both = np.array([known[pair] for pair in zip(kinds, samples)])
        return both[:, 0], both[:, 1]

    def forwards(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return in how many micro-batches each rank computes `samples`."""
        held = self.memory or (None,) * self.size
        return tuple([forwards(n, unit=1, micro_batch=self._size(n, most)) for n, most in zip(samples, held)])

    def _size(self, samples: int, held: int | None) -> int:
        """The largest micro-batch of a share, on a device whose memory holds so many samples."""
        if self.unit > 1:
            return self.unit
        return min(self.micro_batch or max(1, samples), held or max(1, samples))

    def factors(self, first: int, count: int, samples: Sequence[int]) -> NDArray[np.float64]:
        """Return how many times as long as without luck and script work takes, by step (rows) and rank."""
        steps = np.arange(first, first + count, dtype=np.uint64)
        if self.jitter_per == "step":
            factors = slowdowns(self.seed, self._names, steps, self.jitter)
        else:
            cuts = np.maximum(1, np.array(self.forwards(samples)))
            factors = np.zeros((count, self.size))
            for index in range(int(cuts.max())):
                draws = slowdowns(self.seed, self._names, steps, self.jitter, index)
                factors += np.where(index < cuts, draws, 0.0) / cuts
        if self.scripted:
            factors = factors / np.array([self.speeds(step) for step in range(first, first + count)])
        return factors

    def speeds(self, step: int) -> NDArray[np.float64]:
        """Return each device's speed in `step` as a multiple of its own."""
        if not self.scripted:
            return np.ones(self.size)
        return np.array([speed_at(device, step) / device.speed for device in self.devices])

    def stalls_s(self, step: int) -> dict[int, float]:
        """Return the ranks that do nothing for a while in `step`, and for how long."""
        if not self.scripted:
            return {}
        stalls = {
            rank: sum(stall.seconds for stall in device.stall if stall.step == step)
            for rank, device in enumerate(self.devices)
        }
        return {rank: seconds for rank, seconds in stalls.items() if seconds}

    @cached_property
    def solo_samples_per_s(self) -> NDArray[np.float64]:
        """What each device does by itself with the whole batch, under its own luck: what eta is measured against."""
        kinds = self._devices_of_kind
        return np.array([solo_samples_per_s(device, self.batch, self.unit) for device in kinds])[self._kinds]

    def ring(self, present: NDArray[np.bool_]) -> Ring:
        """Return what it takes the ranks `present` to add their gradients up."""
        hosts = [rank.host for rank, here in zip(self.problem.ranks, present) if here]
        if len(hosts) < 2:
            return Ring(((np.zeros(self.size), 0.0),), 0.0)
        rings_s = bucket_rings_s(self.problem, hosts)
        left_s = np.cumsum(rings_s[::-1])[::-1]
        # Where all are equal and come evenly, the first and the last one decide.
        which = range(len(rings_s)) if self.problem.model.bucket_bytes else sorted({0, len(rings_s) - 1})
        return Ring(tuple((self._still_to_come[bucket], float(left_s[bucket])) for bucket in which), self._vote_s)

    @cached_property
    def _still_to_come(self) -> NDArray[np.float64]:
        """By bucket and rank."""
        ready = np.array([ready_parts(self.problem, device) for device in self._devices_of_kind])
        return 1.0 - ready[self._kinds].T

    @cached_property
    def _vote_s(self) -> float:
        """Of all devices together: it looks at every pair of hosts, too much for each change of membership."""
        return vote_s([rank.host for rank in self.problem.ranks], self.problem.link)

    @cached_property
    def _known_work(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    @cached_property
    def _kinds(self) -> list[int]:
        numbers: dict[tuple, int] = {}
        return [numbers.setdefault(_costs(rank.device), len(numbers)) for rank in self.problem.ranks]

    @cached_property
    def _devices_of_kind(self) -> list[DeviceProfile]:
        first: dict[int, DeviceProfile] = {}
        for kind, rank in zip(self._kinds, self.problem.ranks):
            first.setdefault(kind, rank.device)
        return list(first.values())

    @cached_property
    def _names(self) -> NDArray[np.uint64]:
        return hashed_names([device.name for device in self.devices])


def virtual_cluster(
    cluster: Cluster,
    profile: Profile | None = None,
    *,
    batch: int | None = None,
    gradient_bytes: int = 0,
    bucket_bytes: int | None = None,
    micro_batch: int | None = None,
    source: str = "the cluster file",
) -> VirtualCluster:
    """Return the devices of `cluster`, with costs from `profile`, or from the file's speeds where there is none.

    Args:
        cluster: with its script.
        profile: measurements.
        batch: samples of a step; None: the profile's, or 32 a device.
        gradient_bytes: what is reduced in a step, where no profile says so.
        bucket_bytes: as `Config.bucket_bytes`; None: its default.
        micro_batch: most samples of one forward; never more than fit into a device's memory.
        source: names the cluster in errors.

    Raises:
        SettingError: nothing says what work costs a device, or a device has no memory for one sample.
    """
    emulation = cluster.emulation
    if profile is None:
        batch = batch or 32 * len(cluster.expanded())
        profile = profile_from_speeds(cluster, global_batch_size=batch, gradient_bytes=gradient_bytes, source=source)
    problem = assemble(profile, cluster)
    changes: dict = {} if batch is None else {"global_batch_size": batch}
    if bucket_bytes is not None:
        changes["bucket_bytes"] = bucket_bytes
    problem = msgspec.structs.replace(problem, **changes)
    for rank in problem.ranks:
        most, unit = largest_micro_batch(rank.device), problem.model.unit
        if most is not None and most < unit:
            at_once = "one sample" if unit == 1 else f"{unit} samples"
            raise SettingError(
                f"{source}: '{rank.name}' has no memory for training {at_once} at a time "
                f"({rank.device.capacity_bytes} bytes). Leave it out, or give it more memory."
            )
    return VirtualCluster(
        problem=problem,
        devices=cluster.expanded(),
        jitter_per=emulation.jitter_per,
        seed=emulation.seed,
        micro_batch=micro_batch,
    )


def _costs(device: DeviceProfile) -> tuple:
    """What two devices have in common that need be looked at only once."""
    same = (device.timings, device.optimizer_s, device.fixed_s, device.forward_part, device.bucket_ready)
    return (*same, device.jitter, device.capacity_bytes, device.memory)
