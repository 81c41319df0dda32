"""What measuring asks of a device that holds a model: the seam, and its fake with a clock of its own.

The one idea: every question is one small piece of real work; what to ask, how often, and what to make of the answers is
decided in `device.py` without torch.
"""

from typing import Protocol

import msgspec


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch, in seconds."""

    data_s: float
    """Until its samples were there."""
    forward_s: float
    total_s: float
    """Forward and backward."""
    ready_s: tuple[float, ...] = ()
    """By bucket: from the backward's begin until all of its gradients were there; empty: nobody looked."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What comes once a step, whatever the batch, in seconds."""

    fixed_s: float
    """Copying, scaling and installing gradients; not the optimizer."""
    optimizer_s: float


class Probe(Protocol):
    """A device with a model, an optimizer and data. One thread uses it."""

    def micro_batch(self, samples: int, *, recompute: bool) -> MicroBatch:
        """Forward and backward of one micro-batch, as training does it."""
        ...

    def update(self) -> Update:
        """End a step: gradients are made ready and the optimizer steps. Creates the optimizer's state."""
        ...

    def fits(self, samples: int, *, recompute: bool) -> bool:
        """Whether a micro-batch of so many samples fits beside the gradients of an earlier one."""
        ...

    def peak_bytes(self, samples: int, *, recompute: bool) -> int:
        """Most memory in use during such a micro-batch that fits."""
        ...

    def kept_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        ...

    @property
    def refusal(self) -> str:
        """Why there are neither blocks nor recomputation; empty: there are."""
        ...

    @property
    def capacity_bytes(self) -> int | None:
        """Memory that training may use; None: not known."""
        ...


class SimulatedProbe:
    """The fake: linear in samples, exact, and moving `now_s` forward by what it says it took."""

    def __init__(
        self,
        *,
        sample_s: float = 0.01,
        micro_batch_s: float = 0.002,
        optimizer_s: float = 0.005,
        fixed_s: float = 0.001,
        fixed_bytes: int = 1000,
        sample_bytes: int = 100,
        recompute_sample_bytes: int = 40,
        capacity_bytes: int | None = None,
        refusal: str = "",
        bucket_ready: tuple[float, ...] = (0.75, 1.0),
    ) -> None:
        self.now_s = 0.0
        self._bucket_ready = bucket_ready
        self.tried: list[int] = []
        self.refusal = refusal
        self.capacity_bytes = capacity_bytes
        self._sample_s, self._micro_batch_s = sample_s, micro_batch_s
        self._update = Update(fixed_s=fixed_s, optimizer_s=optimizer_s)
        self._fixed_bytes = fixed_bytes
        self._sample_bytes = {False: sample_bytes, True: recompute_sample_bytes}

    def clock(self) -> float:
        """The fake's time, in seconds."""
        return self.now_s

    def micro_batch(self, samples: int, *, recompute: bool) -> MicroBatch:
        """A third of the time is forward; recomputation does it twice."""
        plain_s = self._micro_batch_s + samples * self._sample_s
        total_s = plain_s * (4 / 3 if recompute else 1)
        ready_s = tuple(part * (total_s - plain_s / 3) for part in self._bucket_ready)
        micro_batch = MicroBatch(data_s=0.0, forward_s=plain_s / 3, total_s=total_s, ready_s=ready_s)
        self.now_s += micro_batch.total_s
        return micro_batch

    def update(self) -> Update:
        """What it was made with."""
        self.now_s += self._update.fixed_s + self._update.optimizer_s
        return self._update

    def fits(self, samples: int, *, recompute: bool) -> bool:
        """Compare the peak with the capacity."""
        self.tried.append(samples)
        self.now_s += samples * self._sample_s
        return self.capacity_bytes is None or self.peak_bytes(samples, recompute=recompute) <= self.capacity_bytes

    def peak_bytes(self, samples: int, *, recompute: bool) -> int:
        """A line."""
        return self._fixed_bytes + samples * self._sample_bytes[recompute]

    def kept_bytes(self) -> int:
        """The line at 0."""
        return self._fixed_bytes
