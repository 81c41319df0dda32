"""What a region of work takes on an emulated device: pure arithmetic over step, micro-batch and samples.

The one idea: random slowdowns are looked up, not drawn. They depend on (seed, device name, step, micro-batch) only, so
that the same device measured alone meets the same luck as in the cluster.
"""

from hashlib import blake2b
from math import exp
from statistics import NormalDist

import msgspec

from ragtag.core.cluster import Device, Emulation
from ragtag.core.mixing import seed_for
from ragtag.core.speed_script import speed_at

_GAUSS = NormalDist()


class DeviceSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds on one device (of count 1); steps count from 1, micro-batches of a step from 0."""

    device: Device
    emulation: Emulation

    def speed_at(self, step: int) -> float:
        """Return the device's speed in `step`, without jitter."""
        return speed_at(self.device, step)

    def compute_s(self, step: int, micro_batch: int, samples: int) -> float:
        """Return the time of forward and backward of one micro-batch of `samples`."""
        emulation = self.emulation
        assert emulation.sample_s is not None, "speed is emulated only where sample_s is given"
        work_s = emulation.micro_batch_s + samples * emulation.sample_s
        return work_s * self._slowdown(step, micro_batch) / self.speed_at(step)

    def optimizer_s(self, step: int) -> float:
        """Return the time of the optimizer step; 0: not emulated."""
        return self.emulation.optimizer_s * self._slowdown(step, None) / self.speed_at(step)

    def fixed_s(self, step: int) -> float:
        """Return the time of the rest of a step that does not shrink with the batch; 0: not emulated."""
        return self.emulation.fixed_s * self._slowdown(step, None) / self.speed_at(step)

    def stall_s(self, step: int, micro_batch: int) -> float:
        """Return how long the device does nothing before it begins that micro-batch."""
        return sum(
            stall.seconds for stall in self.device.stall if (stall.step, stall.micro_batch) == (step, micro_batch)
        )

    def step_s(self, step: int, micro_batches: tuple[int, ...]) -> float:
        """Return the time of a whole step alone, with micro-batches of these sizes: what a solo run should measure."""
        compute_s = sum(
            self.stall_s(step, index) + self.compute_s(step, index, samples)
            for index, samples in enumerate(micro_batches)
        )
        return compute_s + self.optimizer_s(step) + self.fixed_s(step)

    def _slowdown(self, step: int, micro_batch: int | None) -> float:
        """The factor exp(sigma * gauss), log-normal with median 1. Work that belongs to no micro-batch has none where
        it is drawn per micro-batch."""
        emulation = self.emulation
        if emulation.jitter == 0 or (emulation.jitter_per == "micro_batch" and micro_batch is None):
            return 1.0
        name = int.from_bytes(blake2b(self.device.name.encode(), digest_size=8).digest(), "little")
        parts = (emulation.seed, name, step)
        if emulation.jitter_per == "micro_batch":
            assert micro_batch is not None
            parts = (*parts, micro_batch)
        # 52 bits and a half: a float holds it exactly, and it is never 0 or 1.
        uniform = ((seed_for(*parts) >> 11) + 0.5) / 2**52
        return exp(emulation.jitter * _GAUSS.inv_cdf(uniform))
