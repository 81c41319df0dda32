"""Whole parameters and optimizer state, put together from all ranks' slices, some elements at a time.

The one idea: whatever is kept element by element lies in a rank's memory like the parameters themselves, so one way of
gathering serves weights, optimizer state, checkpoints and new slices alike.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ragtag.checkpoint.parts import Described, Part, spans
from ragtag.comm.group import Group, Work
from ragtag.runtime.zero.flats import Flat
from ragtag.runtime.zero.optimizer_state import PieceOptimizer

_AHEAD = 1
"""Gathers that are under way while what came before is written."""

Fill = Callable[[torch.Tensor, int], None]
"""Called with memory and an element of a flat: writes what this rank has from there on into all of it."""


class Kept(NamedTuple):
    """What some rank's optimizer keeps of a parameter under a name."""

    elementwise: bool
    dtype: str
    value: float | None
    """Where it is one number."""
    is_tensor: bool


class Whole(NamedTuple):
    """All of what is cut, as one rank could hold it: what there is, and then its values."""

    parameters: Mapping[int, Described]
    """By number; those that are whole on every rank are left out."""
    optimizer: Mapping[str, Any]
    """`state_dict` of the optimizer as over whole parameters, in its own order; what it keeps by element described."""
    parts: Iterator[Part]
    """All of what is described, on rank 0; elsewhere nothing. To go through it is a call of the group."""


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


def whole_of(optimizer: PieceOptimizer, flats: Sequence[Flat], group: Group) -> Whole:
    """Return all of what is cut; a call of the group, as is going through its parts."""
    kept = kept_of(optimizer, flats, group)
    members = {member.number: (flat, member) for flat in flats for member in flat.members}
    parameters = {
        number: Described(member.parameter.shape, flat.dtype)
        for number, (flat, member) in members.items()
        if not flat.whole
    }
    states: dict[int, dict[str, Any]] = {}
    for number, named in kept.items():
        shape = members[number][1].parameter.shape
        states[number] = {
            name: Described(shape, getattr(torch, each.dtype)) if each.elementwise else single(each)
            for name, each in named.items()
        }

    def parts() -> Iterator[Part]:
        for flat in flats:
            own = {member.number: parameters[member.number] for member in flat.members if not flat.whole}
            yield from _parts(flat, own, _fill_values(flat), group)
            for (name, _), described in _elementwise(flat, states).items():
                yield from _parts(flat, described, _fill_state(flat, optimizer, name), group)

    return Whole(parameters, optimizer.state_dict(states), parts())


def _elementwise(
    flat: Flat, states: Mapping[int, Mapping[str, Any]]
) -> dict[tuple[str, torch.dtype], dict[int, Described]]:
    """What is kept by element of a flat's parameters, by name and dtype."""
    found: dict[tuple[str, torch.dtype], dict[int, Described]] = {}
    for member in flat.members:
        for name, value in states.get(member.number, {}).items():
            if isinstance(value, Described):
                found.setdefault((name, value.dtype), {})[member.number] = value
    return found


def _parts(flat: Flat, described: Mapping[int, Described], fill: Fill, group: Group) -> Iterator[Part]:
    """Gather what is kept of the flat's parameters that are in `described`, with few parts in memory at a time."""
    coming: deque[tuple[int, torch.Tensor, Work]] = deque()

    def arrived() -> Iterator[Part]:
        low, content, work = coming.popleft()
        group.wait(work, "putting slices together")
        for member in flat.members if group.rank == 0 else ():
            first, last = max(low, member.start), min(low + content.numel(), member.stop)
            if first < last:
                yield Part(described[member.number], first - member.start, content[first - low : last - low])

    for low, high in _runs(flat, described):
        dtype = next(iter(described.values())).dtype
        for first, last in spans(low, high, dtype.itemsize):
            content = torch.zeros(last - first, dtype=dtype)
            coming.append((first, content, _gather(flat, first, content, fill, group)))
            del content
            if len(coming) > _AHEAD:
                yield from arrived()
    while coming:
        yield from arrived()


def _runs(flat: Flat, described: Mapping[int, Described]) -> Iterator[tuple[int, int]]:
    """From where to where parameters in `described` follow on each other in a flat, in elements."""
    low = high = 0
    for member in flat.members:
        if member.number not in described:
            continue
        if member.start != high:
            if low < high:
                yield low, high
            low = member.start
        high = member.stop
    if low < high:
        yield low, high


def _gather(flat: Flat, first: int, content: torch.Tensor, fill: Fill, group: Group) -> Work:
    """Begin to have all of `content`, a flat's elements from `first` on, on every rank."""
    last = first + content.numel()
    low, high = max(first, flat.start), min(last, flat.stop)
    if low < high:
        fill(content[low - first : high - first], low)
    starts = [sum(flat.sizes[:rank]) for rank in range(group.world_size)]
    sizes = [
        max(0, min(last, start + size) - max(first, start)) * content.itemsize
        for start, size in zip(starts, flat.sizes)
    ]
    # As bytes, which the ring takes as they are: half precision would be widened on its way.
    return group.all_gather(content.view(torch.uint8), sizes)


def _fill_values(flat: Flat) -> Fill:
    def fill(content: torch.Tensor, low: int) -> None:
        content.copy_(flat.own[low - flat.start : low - flat.start + content.numel()])

    return fill


def _fill_state(flat: Flat, optimizer: PieceOptimizer, name: str) -> Fill:
    def fill(content: torch.Tensor, low: int) -> None:
        for piece in flat.pieces:
            begin = piece.member.start + piece.first
            first, last = max(low, begin), min(low + content.numel(), piece.member.start + piece.last)
            value = optimizer.state_of(piece.member.number).get(name) if first < last else None
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                content[first - low : last - low].copy_(value.reshape(-1)[first - begin : last - begin])

    return fill


def gathered(flat: Flat, own: torch.Tensor, group: Group, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return all of what `own` is this rank's slice of, on every rank, in host memory; a call of the group.

    Args:
        sizes: elements by rank; None: the flat's slices.
    """
    sizes = flat.sizes if sizes is None else sizes
    whole = torch.zeros(flat.numel, dtype=own.dtype)
    start = sum(sizes[: group.rank])
    whole[start : start + sizes[group.rank]].copy_(own[: sizes[group.rank]])
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
        _fill_state(flat, optimizer, name)(own, flat.start)
        yield name, own


def single(kept: Kept) -> Any:
    """Return what is one number as it was."""
    if kept.is_tensor:
        return torch.tensor(kept.value, dtype=getattr(torch, kept.dtype))
    return {"int": int, "bool": bool}.get(kept.dtype, float)(kept.value or 0.0) if kept.value is not None else None
