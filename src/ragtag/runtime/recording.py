"""What the event log is told, and who listens where there is none.

The one idea: the training code tells a recorder in any case, so that no line of it asks whether there is a log.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ragtag.core.values import StepReport

if TYPE_CHECKING:
    from ragtag.runtime.run import Run


class Recorder(Protocol):
    """Told of everything that belongs into the log."""

    def began(self, run: "Run", script: str) -> None:
        """The run begins here, or goes on, or this rank has joined it."""
        ...

    def looped(self, run: "Run", last: int) -> None:
        """The script has called `steps`, up to step `last`."""
        ...

    def step(self, run: "Run", settling: Any, report: StepReport) -> None:
        """A step was committed; `settling` holds the votes on it."""
        ...

    def evaluated(self, step: int, value: float, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""
        ...

    def saved(self, step: int, path: str, took_s: float) -> None:
        """A checkpoint is complete."""
        ...

    def ended(self, step: int, reason: str) -> None:
        """The run ends; empty: as it should."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class NoRecorder:
    """There is no log, or another rank writes it."""

    def began(self, run: "Run", script: str) -> None:
        """Do nothing."""

    def looped(self, run: "Run", last: int) -> None:
        """Do nothing."""

    def step(self, run: "Run", settling: Any, report: StepReport) -> None:
        """Do nothing."""

    def evaluated(self, step: int, value: float, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def saved(self, step: int, path: str, took_s: float) -> None:
        """Do nothing."""

    def ended(self, step: int, reason: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
