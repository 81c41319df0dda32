"""Where the user's script is: which steps each `steps(n)` call covers, and what past `evaluate` calls returned.

A plain `for epoch: steps(100); evaluate()` script can then be started again after a `load` and runs through what is
already committed in no time: ranges that lie in the past yield nothing, evaluations in the past return what they
returned. An evaluation inside a loop over `steps` needs no record: the loop's body is not run again for past steps.
"""

from collections.abc import Mapping
from typing import Any


class ScriptPosition:
    """The cursor of one script run; steps count from 1.

    Calls cover steps without gap or overlap: one that is left early, or still open when the next one starts, ends at
    the last committed step.
    """

    def __init__(self) -> None:
        self._calls: list[list[int]] = []  # first step, last step, whether it has ended
        self._num_claimed = 0
        self._open: int | None = None
        self._cursor = 0
        self._ordinal = 0
        self._evaluations: dict[str, Any] = {}
        self._joined_at = 0

    def claim(self, n: int, *, committed: int) -> tuple[int, int]:
        """Start the next `steps(n)` call: its number, and the last step it covers (a committed one: none is left)."""
        if self._open is not None:
            self.finish(self._open, committed=committed, complete=False)
        call = self._num_claimed
        self._num_claimed += 1
        first, last, ended = self._calls[call] if call < len(self._calls) else (self._cursor + 1, 0, 0)
        if not ended:
            last = first - 1 + n
            self._calls[call:] = [[first, last, 0]]
        self._cursor, self._open = last, call
        return call, last

    def is_open(self, call: int) -> bool:
        """Whether a call has not ended: by its end, a `break`, or the start of the next one."""
        return call == self._open

    def finish(self, call: int, *, committed: int, complete: bool) -> None:
        """End a call: complete, or left early by a `break`, after which the next call goes on from `committed`."""
        if call != self._open:
            return
        first, last, _ = self._calls[call]
        if not complete:
            last = max(first - 1, min(last, committed))
        self._calls[call] = [first, last, 1]
        self._cursor, self._open, self._ordinal = last, None, 0

    def join(self, state: Mapping[str, Any], *, committed: int) -> None:
        """Adopt the history of scripts that are under way: this one, just started, has all up to their open call in its
        past."""
        self.load_state_dict(state, committed=committed, replay=True)
        self._joined_at = len(self._calls)

    @property
    def catching_up(self) -> bool:
        """Whether the others, whose run was joined, have done already what comes next in this script."""
        return self._num_claimed < self._joined_at

    def recorded(self) -> Any | None:
        """What the evaluation at this place of the script returned, if it lies in the past."""
        value = None if self._open is not None else self._evaluations.get(self._place())
        if value is not None:
            self._ordinal += 1
        return value

    def record(self, value: Any) -> None:
        """Remember what the evaluation at this place returned."""
        if self._open is None:
            self._evaluations[self._place()] = value
            self._ordinal += 1

    def _place(self) -> str:
        """After how many calls, and the how manieth evaluation there."""
        return f"{self._num_claimed}/{self._ordinal}"

    def state_dict(self) -> dict[str, Any]:
        """Calls as [first, last, ended] and evaluations by place."""
        return {"calls": [list(call) for call in self._calls], "evaluations": dict(self._evaluations)}

    def load_state_dict(self, state: Mapping[str, Any], *, committed: int, replay: bool) -> None:
        """Adopt a saved history.

        With `replay`, and before the first `steps` call, the script is taken to be the same one, started again.
        Otherwise this script's own calls so far count as past, an open one stays open, and what comes next goes on
        after step `committed`.
        """
        if replay and self._num_claimed == 0:
            self._calls = [list(call) for call in state["calls"]]
            self._evaluations = dict(state["evaluations"])
            self._cursor = 0
            return
        here = (self._num_claimed, self._ordinal)
        past_evaluations = {place: value for place, value in self._evaluations.items() if _numbers(place) < here}
        still_open = [] if self._open is None else [self._calls[self._open]]
        past = [[committed + 1, committed, 1]] * (self._num_claimed - len(still_open))
        self._calls = [*past, *([min(first, committed + 1), max(last, committed), 0] for first, last, _ in still_open)]
        self._cursor = self._calls[-1][1] if still_open else committed
        self._evaluations = past_evaluations  # for those who join later and come through them again


def _numbers(place: str) -> tuple[int, int]:
    calls, ordinal = map(int, place.split("/"))
    return calls, ordinal
