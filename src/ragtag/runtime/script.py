"""Where the user's script is: which steps each `steps(n)` call covers, and what past `evaluate` calls returned.

A plain `for epoch: steps(100); evaluate()` script can then be started again after a `load` and runs through what is
already committed in no time: ranges that lie in the past yield nothing, evaluations in the past return what they
returned.
"""

from collections.abc import Mapping
from typing import Any


class ScriptPosition:
    """The cursor of one script run; steps count from 1."""

    def __init__(self) -> None:
        self._next_call = 0
        self._cursor = 0
        self._ordinal = 0
        self._calls: list[list[int]] = []
        self._evaluations: dict[str, Any] = {}

    def claim(self, n: int) -> tuple[int, int, int]:
        """Start the next `steps(n)` call: its number and the first and last step it covers (last < first: none)."""
        call = self._next_call
        self._next_call += 1
        if call < len(self._calls) and self._calls[call][2]:
            first, last, _ = self._calls[call]
        else:
            first, last = self._cursor + 1, self._cursor + n
            del self._calls[call:]
            self._calls.append([first, last, 0])
        self._cursor, self._ordinal = last, 0
        return call, first, last

    def finish(self, call: int, *, committed: int, complete: bool) -> None:
        """End a call: complete, or left early by a `break`, after which the next call goes on from `committed`."""
        if call >= len(self._calls):
            return
        first, last, _ = self._calls[call]
        if not complete:
            last = max(first - 1, min(last, committed))
            if call == self._next_call - 1:
                self._cursor = last
        self._calls[call] = [first, last, 1]

    def recorded(self) -> Any | None:
        """What the evaluation at this place of the script returned, if it lies in the past."""
        value = self._evaluations.get(self._key())
        if value is not None:
            self._ordinal += 1
        return value

    def record(self, value: Any) -> None:
        """Remember what the evaluation at this place returned."""
        self._evaluations[self._key()] = value
        self._ordinal += 1

    def _key(self) -> str:
        return f"{self._cursor}/{self._ordinal}"

    def state_dict(self) -> dict[str, Any]:
        """Calls as [first, last, ended] and evaluations by place."""
        return {"calls": [list(call) for call in self._calls], "evaluations": dict(self._evaluations)}

    def load_state_dict(self, state: Mapping[str, Any], *, committed: int, replay: bool) -> None:
        """Adopt a saved history.

        With `replay`, and before the first `steps` call, the script is taken to be the same one, started again.
        Otherwise the next call goes on after step `committed`.
        """
        self._evaluations = dict(state["evaluations"])
        if replay and self._next_call == 0:
            self._calls = [list(call) for call in state["calls"]]
        else:
            self._calls = [[0, 0, 1]] * self._next_call
            self._cursor = committed
            self._ordinal = sum(1 for key in self._evaluations if key.startswith(f"{committed}/"))
