"""Buffers that forward changes (BatchNorm's running statistics), so that any assignment of units gives the same values.

Each unit starts from the step's buffers; what its forward changed is read right after it (recompute in backward
changes them again, and that must not count), weighted by its samples, summed over ranks, and merged once the step is
committed.
"""

from collections.abc import Sequence

import torch

from ragtag.comm.group import Group, Work
from ragtag.runtime.device import HostMirror, statistics_dtype
from ragtag.runtime.names import buffer_owners


class UnitBuffers:
    """The changing buffers `names` of one model during one step.

    merged = start + (sum over units of samples x (after - start)) / (sum of samples), integers rounded.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str], group: Group) -> None:
        self.names = tuple(names)
        owners = buffer_owners(model)
        self._places = [owners[name] for name in names]
        self._group = group
        self._buffers: list[torch.Tensor] = []
        self._start: list[torch.Tensor] = []
        self._work: Work | None = None
        if self.names:
            now = self.values()
            size = sum(buffer.numel() for buffer in now) + 1
            self._change = torch.zeros(size, dtype=statistics_dtype(now[0].device), device=now[0].device)
            self.renew()

    def renew(self) -> None:
        """Make a new tensor for the sum over ranks, and keep the own changes; see `GradientSums.renew`."""
        if self.names:
            self._sum = torch.zeros_like(self._change)
            travels = (self._group.elastic or self._group.world_size > 1) and self._group.device_sum is None
            self._mirror = HostMirror(self._sum, travels=travels)
            self._work = None

    def values(self) -> list[torch.Tensor]:
        """The buffers as they are now."""
        found = [module._buffers[key] for module, key in self._places]
        assert all(buffer is not None for buffer in found)
        return [buffer for buffer in found if buffer is not None]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the step's start."""
        if self.names:
            self._buffers = self.values()
            self._start = [buffer.clone() for buffer in self._buffers]
            self._change.zero_()
            self._work = None

    @torch.no_grad()
    def begin_unit(self) -> None:
        """Put the step's start back before a unit's forward."""
        for (module, key), buffer, start in zip(self._places, self._buffers, self._start):
            buffer.copy_(start)
            module._buffers[key] = buffer  # forward may have put another tensor in its place

    @torch.no_grad()
    def end_forward(self, num_samples: int) -> None:
        """Read what this unit's forward changed, weighted by its samples."""
        if not self.names:
            return
        offset = 0
        for buffer, start in zip(self.values(), self._start):
            change = self._change[offset : offset + buffer.numel()].view(buffer.shape)
            change.add_(buffer.to(change.dtype) - start.to(change.dtype), alpha=num_samples)
            offset += buffer.numel()
        self._change[-1] += num_samples

    @torch.no_grad()
    def drop(self) -> None:
        """Go back to the step's start: its units are computed again."""
        if self.names:
            self.begin_unit()
            self._change.zero_()

    def launch(self) -> None:
        """Start summing the changes over ranks; the own ones stay, so it can be done again."""
        if self.names:
            self._sum.copy_(self._change)
            self._mirror.send()
            self._work = self._group.all_reduce(self._mirror.host, ready=self._mirror.ready)

    def wait(self) -> None:
        """Wait for the sum over ranks (bounded by the group); again: nothing."""
        if self._work is not None:
            self._group.wait(self._work, "reducing buffers")
            self._mirror.receive()
            self._work = None

    def zeros(self) -> list[torch.Tensor]:
        """What a rank adds that has computed nothing: one host tensor, or none where no buffer changes."""
        return [torch.zeros_like(self._mirror.host)] if self.names else []

    def accept(self, changes: Sequence[torch.Tensor]) -> None:
        """Begin a step whose reduced `changes` are known already."""
        self.begin()
        for change in changes:
            self._sum.copy_(change)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the merged values."""
        if not self.names:
            return
        self.begin_unit()
        mean = self._sum[:-1] / self._sum[-1]
        offset = 0
        for buffer, start in zip(self._buffers, self._start):
            change = mean[offset : offset + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                buffer.copy_(start.to(change.dtype) + change)
            else:
                buffer.copy_(start + change.round().to(buffer.dtype))
            offset += buffer.numel()
        self._start = []

    def roll_back(self) -> None:
        """Put the step's start back: the step is skipped, done again or abandoned. After a commit: nothing."""
        self.begin_unit()
        self._start = []
