"""Other tools that are fed from the event log: TensorBoard, Prometheus, Weights & Biases.

The one idea: a sink takes events one by one and knows nothing of where they come from; one that fails is said once and
left out, and the others go on.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ragtag.core.errors import SettingError
from ragtag.watch.events import AnyEvent

log = logging.getLogger("ragtag")


class Sink(Protocol):
    """Somebody who is told of everything."""

    name: str
    """For people."""

    def take(self, event: AnyEvent) -> None:
        """One event, in the log's order."""
        ...

    def close(self) -> None:
        """No more come."""
        ...


class Sinks:
    """Several of them."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def take(self, event: AnyEvent) -> None:
        """Pass an event on to all that have not failed."""
        for sink in tuple(self._sinks):
            try:
                sink.take(event)
            except Exception as error:
                self._leave_out(sink, error)

    def close(self) -> None:
        """Close all."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._leave_out(sink, error)
        self._sinks.clear()

    def _leave_out(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        log.warning("%s is left out from now on: %s: %s", sink.name, type(error).__name__, error)


def sinks_of(*, tensorboard: Path | None = None, prometheus: int | None = None, wandb: str | None = None) -> Sinks:
    """Return the sinks that are asked for.

    Args:
        tensorboard: directory for its event files.
        prometheus: port on this machine's loopback where /metrics is served; 0: any, which is said.
        wandb: project.

    Raises:
        SettingError: a package is missing, or the port is taken.
    """
    sinks: list[Sink] = []
    if tensorboard is not None:
        try:
            from ragtag.watch.sinks.tensorboard import TensorBoard
        except ImportError:
            raise _missing("TensorBoard", "tensorboard") from None
        sinks.append(TensorBoard(tensorboard))
    if prometheus is not None:
        try:
            from ragtag.watch.sinks.prometheus import Prometheus
        except ImportError:
            raise _missing("Prometheus", "prometheus") from None
        try:
            sinks.append(Prometheus(prometheus))
        except OSError as error:
            raise SettingError(f"--prometheus {prometheus}: {error.strerror}. Name another port.") from None
    if wandb is not None:
        try:
            from ragtag.watch.sinks.wandb import WeightsAndBiases
        except ImportError:
            raise _missing("Weights & Biases", "wandb") from None
        sinks.append(WeightsAndBiases(wandb))
    return Sinks(sinks)


def _missing(name: str, extra: str) -> SettingError:
    return SettingError(f"{name} needs a package that is not installed: pip install 'ragtag[{extra}]'.")
