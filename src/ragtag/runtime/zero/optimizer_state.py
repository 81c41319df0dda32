"""The user's own optimizer over pieces of parameters: its groups, settings, schedulers and hooks stay what they are.

The one idea: only the parameters in its groups are replaced. What it keeps for a piece is either as long as the piece
(and is cut, moved and put together with it) or one number for all of a parameter, such as a count of steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragtag.core.errors import ModelError
from ragtag.runtime.zero.flats import Piece

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
        for index, piece in self._pieces.items():
            known = self._cut(self._whole.get(index, {}), piece) if states is None else states.get(index, {})
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

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of whole parameters, as `state_dict` of the optimizer over them gives it."""
        own: dict[str, Any] = {"state": {}, "param_groups": []}
        position = 0
        for saved, indices in zip(state_dict["param_groups"], self.groups, strict=True):
            numbers = []
            for number, index in zip(saved["params"], indices, strict=True):
                if index not in self._pieces:
                    continue
                state = state_dict["state"].get(number)
                if state:
                    own["state"][position] = self._cut(state, self._pieces[index])
                numbers.append(position)
                position += 1
            own["param_groups"].append({**saved, "params": numbers})
        self.optimizer.load_state_dict(own)

    def _cut(self, state: Mapping[str, Any], piece: Piece) -> PieceState:
        cut: PieceState = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                if value.shape != piece.member.parameter.shape:
                    raise ModelError(
                        f"{type(self.optimizer).__name__} keeps '{name}' of shape {tuple(value.shape)} for the "
                        f"parameter '{piece.member.name}' of shape {tuple(piece.member.parameter.shape)}: it is not "
                        f"elementwise, so slices cannot be trained. Take Config(layout='replicated')."
                    )
                value = value.detach().reshape(-1)[piece.first : piece.last].clone()
            elif isinstance(value, torch.Tensor):
                value = value.detach().clone()
            cut[name] = value
        return cut
