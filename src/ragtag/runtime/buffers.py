"""Buffers that forward changes (BatchNorm's running statistics), so that any assignment of units gives the same values.

Each unit starts from the step's buffers; what its forward changed is read right after it (recompute in backward
changes them again, and that must not count), weighted by its samples, summed over ranks, and merged once the step is
committed.
"""

from collections.abc import Sequence

import torch

from ragtag.comm.group import Group, Work
from ragtag.runtime.device import statistics_dtype


class UnitBuffers:
    """The changing buffers of one model during one step.

    merged = start + (sum over units of samples x (after - start)) / (sum of samples), integers rounded.
    """

    def __init__(self, buffers: Sequence[tuple[str, torch.Tensor]], group: Group) -> None:
        self.names = [name for name, _ in buffers]
        self._buffers = [buffer for _, buffer in buffers]
        self._group = group
        self._start: list[torch.Tensor] = []
        self._work: Work | None = None
        if self._buffers:
            dtype = statistics_dtype(self._buffers[0].device)
            size = sum(buffer.numel() for buffer in self._buffers) + 1
            self._change = torch.zeros(size, dtype=dtype, device=self._buffers[0].device)

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the step's start."""
        if self._buffers:
            self._start = [buffer.clone() for buffer in self._buffers]
            self._change.zero_()
            self._work = None

    @torch.no_grad()
    def begin_unit(self) -> None:
        """Put the step's start back before a unit's forward."""
        for buffer, start in zip(self._buffers, self._start):
            buffer.copy_(start)

    @torch.no_grad()
    def end_forward(self, num_samples: int) -> None:
        """Read what this unit's forward changed, weighted by its samples."""
        if not self._buffers:
            return
        offset = 0
        for buffer, start in zip(self._buffers, self._start):
            change = self._change[offset : offset + buffer.numel()].view(buffer.shape)
            change.add_(buffer.to(change.dtype) - start.to(change.dtype), alpha=num_samples)
            offset += buffer.numel()
        self._change[-1] += num_samples

    def launch(self) -> None:
        """Start summing the changes over ranks."""
        if self._buffers:
            self._reduced = self._change.cpu()
            self._work = self._group.all_reduce(self._reduced)

    def wait(self) -> None:
        """Wait for the sum over ranks (bounded by the group)."""
        if self._work is not None:
            self._group.wait(self._work, "reducing buffers")

    @torch.no_grad()
    def commit(self) -> None:
        """Write the merged values."""
        if not self._buffers:
            return
        mean = (self._reduced[:-1] / self._reduced[-1]).to(self._change.device)
        offset = 0
        for buffer, start in zip(self._buffers, self._start):
            change = mean[offset : offset + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                buffer.copy_(start.to(change.dtype) + change)
            else:
                buffer.copy_(start + change.round().to(buffer.dtype))
            offset += buffer.numel()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Put the step's start back: the step is skipped or done again."""
        self.begin_unit()
