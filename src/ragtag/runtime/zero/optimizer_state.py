"""The user's own optimizer over pieces of parameters: its groups, settings, schedulers and hooks stay what they are.

The one idea: only the parameters in its groups are replaced. What it keeps for a piece is either as long as the piece
(and is cut, moved and put together with it) or one number for all of a parameter, such as a count of steps.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ragtag.checkpoint.parts import Described
from ragtag.core.errors import ModelError
from ragtag.runtime.zero.flats import Member, Piece

PieceState = dict[str, Any]
"""What an optimizer keeps of one parameter."""


class PieceOptimizer:
    """An optimizer whose groups hold this rank's pieces in place of parameters.

    Args:
        optimizer: over the model's parameters; changed in place.
        index_of: the number of each parameter, by id.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index_of: Mapping[int, int]) -> None:
        self.optimizer = optimizer
        self.groups: list[list[int]] = [
            [index_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups
        ]
        """By group, the numbers of its parameters, in its own order."""
        self._whole = {index_of[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}
        self._pieces: dict[int, Piece] = {}

    def take(self, pieces: Sequence[Piece], states: Mapping[int, PieceState] | None = None) -> None:
        """Train these from now on, with what is kept of them so far.

        Args:
            states: by parameter, as `state_of` gives it; None: what the optimizer came with, of whole parameters.
        """
        self._pieces = {piece.member.number: piece for piece in pieces}
        for group, indices in zip(self.optimizer.param_groups, self.groups):
            group["params"] = [self._pieces[index].parameter for index in indices if index in self._pieces]
        self.optimizer.state.clear()
        named = kept_by_element(self._whole.values())
        for index, piece in self._pieces.items():
            known = self._cut(self._whole.get(index, {}), piece, named) if states is None else states.get(index, {})
            if known:
                self.optimizer.state[piece.parameter] = known
        self._whole = {}

    def state_of(self, index: int) -> PieceState:
        """What is kept of this rank's piece of a parameter; empty: nothing, or it has none."""
        piece = self._pieces.get(index)
        return {} if piece is None else dict(self.optimizer.state.get(piece.parameter, {}))

    def is_elementwise(self, index: int, value: Any) -> bool:
        """Whether what is kept under some name has one number for each element."""
        piece = self._pieces[index]
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == piece.parameter.numel()

    def state_dict(self, states: Mapping[int, PieceState]) -> dict[str, Any]:
        """Return the optimizer's `state_dict` as over whole parameters, of which `states` is kept, by parameter."""
        return whole_state_dict(self.settings(), self.groups, states)

    def settings(self) -> list[dict[str, Any]]:
        """The groups' settings, as in a `state_dict`."""
        return [{**group} for group in self.optimizer.state_dict()["param_groups"]]

    def states_in(self, state_dict: Mapping[str, Any]) -> dict[int, PieceState]:
        """Return by parameter what is kept in a `state_dict` as over whole parameters."""
        found: dict[int, PieceState] = {}
        for saved, indices in zip(state_dict["param_groups"], self.groups, strict=True):
            for number, index in zip(saved["params"], indices, strict=True):
                if state := state_dict["state"].get(number):
                    found[index] = state
        return found

    def load(self, param_groups: Sequence[Mapping[str, Any]], states: Mapping[int, PieceState]) -> None:
        """Take the settings of groups, as in a `state_dict` as over whole parameters, and what is kept of this rank's
        pieces, by parameter."""
        own: dict[str, Any] = {"state": {}, "param_groups": []}
        position = 0
        for saved, indices in zip(param_groups, self.groups, strict=True):
            numbers = []
            for index in indices:
                if index not in self._pieces:
                    continue
                if state := states.get(index):
                    own["state"][position] = state
                numbers.append(position)
                position += 1
            own["param_groups"].append({**saved, "params": numbers})
        self.optimizer.load_state_dict(own)

    def _cut(self, state: Mapping[str, Any], piece: Piece, by_element: Collection[str]) -> PieceState:
        cut: PieceState = {}
        for name, value in state.items():
            if self.is_cut(name, value, piece.member, by_element):
                value = value.detach().reshape(-1)[piece.first : piece.last]
                value = value.to(piece.parameter.device, copy=True)
            elif isinstance(value, torch.Tensor):
                value = value.detach().clone()
            cut[name] = value
        return cut

    def is_cut(self, name: str, value: Any, member: Member, by_element: Collection[str]) -> bool:
        """Return whether what is kept of a whole parameter under some name has a number for each element.

        Args:
            by_element: names of which that is known, from other parameters; see `kept_by_element`.

        Raises:
            ModelError: it is neither that nor one number.
        """
        if not isinstance(value, torch.Tensor | Described):
            return False
        shape, whole = tuple(value.shape), tuple(member.parameter.shape)
        if shape and shape != whole:
            raise ModelError(
                f"{type(self.optimizer).__name__} keeps '{name}' of shape {shape} for the parameter '{member.name}' of "
                f"shape {whole}: it is not elementwise, so slices cannot be trained. Take Config(layout='replicated')."
            )
        # Of a parameter that is one number itself, a count of steps looks like anything else.
        return bool(shape) or (not whole and (name in by_element if by_element else name != "step"))


def kept_by_element(states: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names under which some whole parameter's state has dimensions."""
    return {
        name
        for state in states
        for name, value in state.items()
        if isinstance(value, torch.Tensor | Described) and len(value.shape)
    }


def whole_state_dict(
    settings: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]], states: Mapping[int, PieceState]
) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer as over whole parameters.

    Args:
        settings: by group.
        groups: the numbers of each group's parameters.
        states: what is kept, by parameter.
    """
    numbers: dict[int, int] = {}
    found = []
    for saved, indices in zip(settings, groups):
        for index in indices:
            numbers.setdefault(index, len(numbers))
        found.append({**saved, "params": [numbers[index] for index in indices]})
    ordered = {numbers[index]: states[index] for index in sorted(states, key=lambda each: numbers[each])}
    return {"state": ordered, "param_groups": found}
