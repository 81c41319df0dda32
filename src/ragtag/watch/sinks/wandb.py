"""Weights & Biases, as thin as can be: the same scalars as TensorBoard's, with the run's settings."""

from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from ragtag.watch.events import AnyEvent, Began
from ragtag.watch.sinks.scalars import Scalars


class WeightsAndBiases:
    """Logs to `project`, as whoever is logged in there."""

    name = "Weights & Biases"

    def __init__(self, project: str) -> None:
        self._scalars = Scalars()
        self._run: Any = wandb.init(project=project)

    def take(self, event: AnyEvent) -> None:
        """Log what is a number over steps."""
        if isinstance(event, Began):
            self._run.config.update({**event.settings, "global_batch_size": event.global_batch_size})
        values: dict[int, dict[str, float]] = {}
        for name, step, value in self._scalars.of(event):
            values.setdefault(step, {})[name] = value
        for step, row in values.items():
            self._run.log(row, step=step)

    def close(self) -> None:
        """Tell it that the run is over."""
        self._run.finish()
