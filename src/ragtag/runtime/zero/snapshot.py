"""A copy of this rank's slices, in host memory, that looks like the slices themselves to whoever puts them together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragtag.runtime.zero.flats import Flat, Piece
from ragtag.runtime.zero.optimizer_state import PieceOptimizer, PieceState, whole_state_dict
from ragtag.runtime.zero.sharding import Sharding


class FlatCopy:
    """A flat, with this rank's slice as it was."""

    def __init__(self, flat: Flat) -> None:
        self.members, self.pieces, self.sizes = flat.members, flat.pieces, flat.sizes
        self.start, self.stop, self.numel, self.dtype, self.whole = (
            flat.start, flat.stop, flat.numel, flat.dtype, flat.whole,
        )  # fmt: skip
        self.own = flat.own.detach().to("cpu", copy=True)


class OptimizerCopy:
    """What the optimizer kept of this rank's pieces, and its groups' settings, as they were."""

    def __init__(self, optimizer: PieceOptimizer, pieces: Sequence[Piece]) -> None:
        self._states = {each.member.number: _copied(optimizer.state_of(each.member.number)) for each in pieces}
        self._lengths = {each.member.number: each.last - each.first for each in pieces}
        self._groups = optimizer.groups
        self._settings = [_copied(settings) for settings in optimizer.settings()]

    def state_of(self, index: int) -> PieceState:
        """What was kept of a piece."""
        return self._states.get(index, {})

    def is_elementwise(self, index: int, value: Any) -> bool:
        """Whether what was kept has one number for each element."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == self._lengths[index]

    def state_dict(self, states: Mapping[int, PieceState]) -> dict[str, Any]:
        """As `PieceOptimizer.state_dict`, of the settings as they were."""
        return whole_state_dict(self._settings, self._groups, states)


def snapshot_of(sharding: Sharding) -> tuple[Any, list[Any]]:
    """Return what stands in for the optimizer and the flats of `sharding` in `whole_of`."""
    return OptimizerCopy(sharding.optimizer, sharding.pieces), [FlatCopy(flat) for flat in sharding.flats]


def _copied(state: Mapping[str, Any]) -> PieceState:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
