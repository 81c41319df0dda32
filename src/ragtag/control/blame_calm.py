"""Steps in which nobody can have held the others up are not looked at one by one.

The one idea: who holds the others up makes steps longer than usual, by more than is let pass here, and more than one of
them; so of some steps in a row that took no longer, one stands for all, as long as nothing is suspected.
"""

from collections.abc import Sequence

from ragtag.control.ballot import Ballot
from ragtag.control.blame import Blame

_LONGER, _STALL = 1.05, 3.0
"""Times a usual step."""
_FAULTS = 20
"""Pages read from disk in a step, by any rank."""


class Sieve:
    """Picks the steps that `blame` is shown."""

    def __init__(self, blame: Blame) -> None:
        self._blame = blame
        self._one_was_longer = False

    def worth_showing(self, steps: Sequence[Sequence[Ballot]]) -> Sequence[int]:
        """Return which of `steps`, the votes of some in a row that come next, to show: all of them, or the last."""
        usual_s, num_longer, remarkable = self._blame.usual_step_s, 0, not self._blame.is_calm
        for ballots in steps:
            longest_s = 0.0
            for vote in ballots:
                own_s = vote.apply_s + vote.data_s + vote.redo_s + vote.compute_s + vote.exposed_s
                longest_s = max(longest_s, own_s)
                if vote.redo_s or vote.absent or vote.fits is not None or vote.faults > _FAULTS:
                    remarkable = True
            num_longer += longest_s > _LONGER * usual_s
            remarkable = remarkable or longest_s > _STALL * usual_s
        # One that is a little longer, by itself, is nobody's fault; one now and then may be.
        look = remarkable or num_longer > 1 or (num_longer == 1 and self._one_was_longer)
        self._one_was_longer = num_longer > 0
        return range(len(steps)) if look else range(len(steps))[-1:]
