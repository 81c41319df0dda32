"""Sums of losses, weights and metrics over a step's micro-batches, kept on the device until the step's one
synchronisation."""

from collections.abc import Sequence

import torch

from ragtag.runtime.device import statistics_dtype
from ragtag.runtime.loss import Loss, Number


class LossSums:
    """What one rank adds up in one step."""

    def __init__(self, metric_names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(metric_names)
        self._device = device
        self._dtype = statistics_dtype(device)
        self._rows: list[list[Number]] = []
        self._units: list[tuple[int, ...]] = []

    def add(self, loss: Loss, units: tuple[int, ...]) -> None:
        """Add one micro-batch; tensors are detached, not read."""
        row = [loss.total, loss.count, *(loss.metrics[name] for name in self._names)]
        self._rows.append([value.detach() if isinstance(value, torch.Tensor) else value for value in row])
        self._units.append(units)

    def numbers(self, *further: Number) -> tuple[list[float], list[float]]:
        """Total, weight and metrics as plain numbers, and the values of `further`: this waits for the device, once."""
        width = 2 + len(self._names)
        on_device: list[torch.Tensor] = []
        on_host = [0.0] * (width + len(further))
        places: list[int] = []
        for row in (*self._rows, [*[0.0] * width, *further]):
            for column, value in enumerate(row):
                if isinstance(value, torch.Tensor):
                    on_device.append(value)
                    places.append(column)
                else:
                    on_host[column] += float(value)
        if on_device:
            on_device = [value.detach().to(self._device, self._dtype, non_blocking=True) for value in on_device]
            for column, value in zip(places, torch.stack(on_device).tolist()):
                on_host[column] += value
        return on_host[:width], on_host[width:]

    def non_finite_units(self) -> list[tuple[int, ...]]:
        """The micro-batches whose own total or weight is not finite (slow path, reads the device)."""
        found = []
        for row, units in zip(self._rows, self._units):
            numbers = torch.tensor([float(value) for value in row[:2]])
            if not bool(torch.isfinite(numbers).all()):
                found.append(units)
        return found
