"""What is to be done at the next step boundary, as all ranks have agreed on it in the vote on a step.

The one idea: a clock or a signal only changes what a rank says on its ballot; what the ballots say together is done
after that step, and so after the same step on every rank.
"""

import signal
import time
from collections.abc import Callable, Sequence


def what_signals_ask(stops: Sequence[int], *, elastic: bool) -> tuple[int, bool]:
    """Return because of which signal all ranks end (0: they go on), and whether some of them leave the others.

    Where ranks come and go, SIGTERM is meant for the process that got it, and what ends all is SIGINT.

    Args:
        stops: the signal that has come to each rank, 0: none.
        elastic: ranks come and go.
    """
    if not elastic:
        return max(stops), False
    return (signal.SIGINT if signal.SIGINT in stops else 0), signal.SIGTERM in stops


class Boundary:
    """Says when a checkpoint is due, and remembers what the votes have decided until it is done.

    Args:
        every_s: seconds from one checkpoint to the next, by rank 0's clock; None: not by time.
        every_steps: a checkpoint is due after each step whose number this divides; None: not by number.
    """

    def __init__(
        self,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s, self._every_steps, self._clock = every_s, every_steps, clock
        self._saved_s = clock()
        self.stop = 0
        """Number of the signal that asks this process to end; 0: none has come. Set from any thread."""
        self.save_agreed = False
        """A checkpoint is to be written before the next step."""
        self.outer_agreed = False
        """What has come from other islands is to be taken in before the next step."""
        self.stop_agreed = 0
        """Number of the signal because of which all ranks end before the next step; 0: they go on."""
        self.leavers: tuple[int, ...] = ()
        """Ranks that leave before the next step, whose slices of the state others take over."""
        self.leave_agreed = False
        """This rank alone ends before the next step, and the others know that one does."""

    def is_due(self, number: int) -> bool:
        """Whether this rank says that a checkpoint is due after step `number`."""
        if self._every_steps is not None and number % self._every_steps == 0:
            return True
        return self._every_s is not None and self._clock() - self._saved_s >= self._every_s

    def agree(self, *, save: bool, stop: int, leavers: Sequence[int] = (), outer: bool = False) -> None:
        """What the votes on a step that was applied have decided; `leavers`: these ranks leave, and before they do,
        what all hold is saved."""
        self.save_agreed = self.save_agreed or save or bool(leavers)
        self.outer_agreed = self.outer_agreed or outer
        self.stop_agreed = self.stop_agreed or stop
        self.leavers = tuple(leavers)
        self.leave_agreed = self.leave_agreed or (bool(leavers) and self.stop == signal.SIGTERM)

    def saved(self) -> None:
        """The checkpoint was written, or could not be; the time to the next one begins."""
        self.save_agreed = False
        self._saved_s = self._clock()
