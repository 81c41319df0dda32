"""What `Run` knows of islands: nothing, where there are none.

The one idea: the step asks four small questions, and without islands each has a constant for an answer, so training
inside one site goes exactly as if there were no other.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ragtag.core.values import StepReport

if TYPE_CHECKING:
    from ragtag.runtime.run import Run


class Islands(Protocol):
    """An island among others, as one of its ranks sees it."""

    @property
    def active(self) -> bool:
        """Whether there are other islands, or may be."""
        ...

    def asks(self, number: int) -> bool:
        """Whether this rank, as the island's first, asks that all stop for the outer loop after step `number`."""
        ...

    def scheduler_steps(self) -> int:
        """By how many steps learning rates go on after this one: they follow the samples of all islands."""
        ...

    def stepped(self, report: StepReport) -> None:
        """A step was applied."""
        ...

    def state_dict(self, run: "Run") -> Any:
        """What newcomers and checkpoints need of it, as JSON."""
        ...

    def load_state_dict(self, run: "Run", state: Mapping[str, Any] | None) -> None:
        """Go on from there."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


class NoIslands:
    """All ranks synchronise exactly, and nobody else trains this model."""

    active = False

    def asks(self, number: int) -> bool:
        """No."""
        return False

    def scheduler_steps(self) -> int:
        """One."""
        return 1

    def stepped(self, report: StepReport) -> None:
        """Nothing to note."""

    def state_dict(self, run: "Run") -> None:
        """Nothing."""

    def load_state_dict(self, run: "Run", state: Mapping[str, Any] | None) -> None:
        """Nothing to take over."""

    def close(self) -> None:
        """Nothing to let go of."""
