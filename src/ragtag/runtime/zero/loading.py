"""What a rank keeps of whole tensors that come in parts: its slices.

The one idea: where a rank's slices are is known before any value comes, so nothing is ever whole: each part is cut on
arrival and let go.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ragtag.checkpoint.parts import Described, Part
from ragtag.runtime.zero.flats import Flat
from ragtag.runtime.zero.optimizer_state import PieceOptimizer, PieceState, kept_by_element

Take = Callable[[int, torch.Tensor], None]
"""Takes a tensor's elements from one on."""


class Loading:
    """Takes parameters as they come, and then, at the end, what the optimizer keeps.

    Args:
        parameters: by number, what is to come of each.
        state_dict: of the optimizer over whole parameters, its tensors described.
        done: called at the end.

    Raises:
        ModelError: it keeps something that cannot be cut.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        optimizer: PieceOptimizer,
        parameters: Mapping[int, Described],
        state_dict: Mapping[str, Any],
        *,
        done: Callable[[], None],
    ) -> None:
        self._optimizer, self._done = optimizer, done
        self._takes: dict[Described, list[Take]] = {}
        self._states: dict[int, PieceState] = {}
        for flat in flats:
            flat.release()  # what may have been gathered holds old values
            for member in flat.members:
                if (described := parameters.get(member.number)) is not None:
                    values = flat.full if flat.whole else flat.own
                    offset = member.start - (0 if flat.whole else flat.start)
                    self._keep(described, values, max(0, -offset), max(0, offset), member.stop - member.start)
        states = optimizer.states_in(state_dict)
        names = kept_by_element(states.values())
        pieces = {piece.member.number: piece for flat in flats for piece in flat.pieces}
        members = {member.number: member for flat in flats for member in flat.members}
        for number, state in states.items():
            for name, value in state.items():
                if not optimizer.is_cut(name, value, members[number], names):
                    continue
                self._takes.setdefault(value, [])
                if (piece := pieces.get(number)) is not None:
                    length = piece.last - piece.first
                    own = optimizer.state_of(number).get(name)  # written over: there may be no room for another one
                    if not (isinstance(own, torch.Tensor) and own.shape == (length,) and own.dtype == value.dtype):
                        own = torch.empty(length, dtype=value.dtype, device=piece.parameter.device)
                    self._keep(value, own, piece.first, 0, length)
                    self._states.setdefault(number, {})[name] = own

    def _keep(self, described: Described, target: torch.Tensor, first: int, at: int, count: int) -> None:
        """Elements from `first` on, at most `count`, go into `target` from `at` on."""
        count = min(count, target.numel() - at)

        @torch.no_grad()
        def take(start: int, values: torch.Tensor) -> None:
            low, high = max(start, first), min(start + values.numel(), first + count)
            if low < high:
                target[at + low - first : at + high - first].copy_(values[low - start : high - start])

        self._takes.setdefault(described, []).append(take)

    def cuts(self, described: Described) -> bool:
        """Whether some rank keeps slices of it."""
        return described in self._takes

    def take(self, part: Part) -> None:
        """Keep what is this rank's."""
        for take in self._takes.get(part.of, ()):
            take(part.first, part.values)

    def finish(self, state_dict: Mapping[str, Any]) -> None:
        """All parts have come: give the optimizer its state.

        Args:
            state_dict: as before; what is not cut is there now.
        """
        whole = self._optimizer.states_in(state_dict)
        # In its own order: what is cut was only described there.
        states = {number: {**state, **self._states.get(number, {})} for number, state in whole.items()}
        self._optimizer.load(state_dict["param_groups"], states)
        self._done()
