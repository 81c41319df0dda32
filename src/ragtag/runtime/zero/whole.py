"""Whole parameters and optimizer state, put together from all ranks' slices, one flat at a time.

The one idea: whatever is kept element by element lies in a rank's memory like the parameters themselves, so one way of
gathering serves weights, optimizer state, checkpoints and new slices alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ragtag.comm.group import Group
from ragtag.runtime.zero.flats import Flat
from ragtag.runtime.zero.optimizer_state import PieceOptimizer


class Kept(NamedTuple):
    """What some rank's optimizer keeps of a parameter under a name."""

    elementwise: bool
    dtype: str
    value: float | None
    """Where it is one number."""
    is_tensor: bool


def kept_of(optimizer: PieceOptimizer, flats: Sequence[Flat], group: Group) -> dict[int, dict[str, Kept]]:
    """Return by parameter and name what the ranks' optimizers keep; a call of the group."""
    own: dict[str, dict[str, list[Any]]] = {}
    for flat in flats:
        for piece in flat.pieces:
            index = piece.member.number
            named = {}
            for name, value in optimizer.state_of(index).items():
                tensor = isinstance(value, torch.Tensor)
                elementwise = optimizer.is_elementwise(index, value)
                dtype = str(value.dtype).removeprefix("torch.") if tensor else type(value).__name__
                named[name] = [elementwise, dtype, None if elementwise else _number(value), tensor]
            if named:
                own[str(index)] = named
    merged: dict[int, dict[str, Kept]] = {}
    for said in group.gather("optimizer state", own):
        for index, named in said.items():
            known = merged.setdefault(int(index), {})
            for name, described in named.items():
                known.setdefault(name, Kept(*described))
    return merged


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, torch.Tensor | int | float) else None


def gathered(flat: Flat, own: torch.Tensor, group: Group, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return all of what `own` is this rank's slice of, on every rank, in host memory; a call of the group.

    Args:
        sizes: elements by rank; None: the flat's slices.
    """
    sizes = flat.sizes if sizes is None else sizes
    whole = torch.zeros(flat.numel, dtype=own.dtype)
    start = sum(sizes[: group.rank])
    whole[start : start + sizes[group.rank]].copy_(own)
    group.wait(group.all_gather(whole, sizes), "putting slices together")
    return whole


def state_slices(
    flat: Flat, optimizer: PieceOptimizer, kept: Mapping[int, Mapping[str, Kept]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give by name what the optimizer keeps element by element of a flat: this rank's slice, 0 where it has none."""
    names: dict[str, str] = {}
    for member in flat.members:
        for name, each in kept.get(member.number, {}).items():
            if each.elementwise:
                names.setdefault(name, each.dtype)
    for name, dtype in names.items():
        own = torch.zeros(flat.stop - flat.start, dtype=getattr(torch, dtype))
        for piece in flat.pieces:
            value = optimizer.state_of(piece.member.number).get(name)
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                offset = piece.member.start + piece.first - flat.start
                own[offset : offset + value.numel()].copy_(value)
        yield name, own


def single(kept: Kept) -> Any:
    """Return what is one number as it was."""
    if kept.is_tensor:
        return torch.tensor(kept.value, dtype=getattr(torch, kept.dtype))
    return {"int": int, "bool": bool}.get(kept.dtype, float)(kept.value or 0.0) if kept.value is not None else None
