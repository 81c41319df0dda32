"""The layout of a run: what of the model's state is cut into slices, chosen by what devices hold.

The one idea: of the layouts that fit, the one that sends least; and slices in proportion to what is free on each device
once everything that is not cut has its place.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from ragtag.core.errors import ModelError, SettingError
from ragtag.core.quantities import format_bytes
from ragtag.core.values import Layout

_USABLE = 0.9
"""Part of a device's memory that is planned with: allocators waste some."""
_PRECISION = 1 << 20
_CUT: tuple[Layout, ...] = ("zero1", "zero2", "zero3")


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model's state."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    largest_block_bytes: int
    """Of the parameters that are gathered at a time; 0 where the model has no blocks."""
    rest_bytes: int = 0
    """Of parameters outside of all blocks, which stay for a whole round; all of them where there are none."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's device offers."""

    capacity_bytes: int
    counts_copies: bool = True
    """Whether whole copies of gradients that travel need room: they do on real devices, not on emulated ones."""

    @property
    def usable_bytes(self) -> int:
        """What is planned with."""
        return int(_USABLE * self.capacity_bytes)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, and relative sizes of slices by rank; empty where nothing is cut."""

    name: Layout = "replicated"
    weights: tuple[int, ...] = ()
    reason: str = ""


def resident_bytes(needs: Needs, layout: Layout, *, counts_copies: bool) -> tuple[int, int]:
    """Return what a device holds whatever its slice, and what is cut among all, in bytes. Activations are not in it."""
    own_sums = (2 if counts_copies else 1) * needs.gradient_bytes
    block = needs.largest_block_bytes
    if layout == "replicated":
        return needs.parameter_bytes + own_sums + needs.optimizer_bytes, 0
    if layout == "zero1":
        return needs.parameter_bytes + own_sums, needs.optimizer_bytes
    rest = needs.rest_bytes
    # Where gradients of the last block leave: themselves, and copies of two blocks' on their way. Of the rest likewise,
    # after all blocks have gone but for one copy.
    if layout == "zero2":
        everywhere = needs.parameter_bytes + max(rest + 3 * block, 2 * rest + block)
        return everywhere, needs.gradient_bytes + needs.optimizer_bytes
    # Besides, the rest of the model, one block in use and one that comes.
    cut = needs.parameter_bytes + needs.gradient_bytes + needs.optimizer_bytes
    return max(2 * rest + 5 * block, 3 * rest + block), cut


def peak_bytes(needs: Needs, layout: Layout, weights: Sequence[int], *, counts_copies: bool = True) -> tuple[int, ...]:
    """Return the most that each rank holds in a step, in bytes; activations are not in it.

    Args:
        weights: relative sizes of slices by rank; of "replicated" only their number counts.
    """
    everywhere, cut = resident_bytes(needs, layout, counts_copies=counts_copies)
    total = sum(weights)
    return tuple(everywhere + (cut * weight // total if total else 0) for weight in weights)


def choose(
    needs: Needs,
    rooms: Sequence[Room],
    hosts: Sequence[str],
    *,
    layout: Layout | Literal["auto"],
    slices: Sequence[int] | None,
) -> Chosen:
    """Return the layout for these devices.

    Args:
        rooms: by rank.
        layout: "auto", or the one that is pinned.
        slices: relative sizes that are pinned.

    Raises:
        SettingError: `slices` are not one a rank.
        ModelError: nothing fits; says how much is missing.
    """
    if slices is not None and (len(slices) != len(rooms) or min(slices) < 0 or not any(slices)):
        raise SettingError(
            f"slices = {tuple(slices)} is not valid for {len(rooms)} ranks. Expected one whole number a rank, at "
            f"least 0 each and not all 0."
        )
    if layout != "auto":
        if layout == "replicated":
            return Chosen()
        if layout == "pipeline":
            return Chosen(name=layout)
        free = _free(needs, layout, rooms)
        pinned = tuple(slices) if slices is not None else _weights(free)
        return Chosen(name=layout, weights=pinned, reason=f"layout {layout}: as configured")
    lacking = _free(needs, "replicated", rooms)
    if min(lacking) >= 0:
        return Chosen()
    tightest = min(range(len(rooms)), key=lambda rank: lacking[rank])
    held, _ = resident_bytes(needs, "replicated", counts_copies=rooms[tightest].counts_copies)
    why = (
        f"a whole replica takes {format_bytes(held)} besides activations, and rank {tightest} ({hosts[tightest]}) has "
        f"{format_bytes(rooms[tightest].capacity_bytes)}"
    )
    missing = 0
    for name in _CUT:
        _, cut = resident_bytes(needs, name, counts_copies=True)
        free = _free(needs, name, rooms)
        if min(free) >= 0 and sum(free) >= cut:
            weights = tuple(slices) if slices is not None else _weights(free)
            return Chosen(name=name, weights=weights, reason=f"layout {name}: {why}")
        missing = max(cut - sum(free), -min(free))
    raise ModelError(
        f"the model fits under no layout: {why}; cut into slices, {format_bytes(missing)} are missing on all devices "
        f"together. Add a device with as much memory, take an optimizer that keeps less, or a smaller model."
    )


def slices_for(needs: Needs, layout: Layout, rooms: Sequence[Room], *, gone: Collection[int] = ()) -> tuple[int, ...]:
    """Return relative sizes of slices for these devices, none for ranks that are `gone`.

    Raises:
        ModelError: they have too little memory together.
    """
    free = [-1 if rank in gone else each for rank, each in enumerate(_free(needs, layout, rooms))]
    _, cut = resident_bytes(needs, layout, counts_copies=True)
    if (missing := cut - sum(max(0, each) for each in free)) > 0:
        error = ModelError(
            f"the devices that are left have {format_bytes(missing)} too few for the model's slices (layout "
            f"'{layout}'). Let machines join, and start again from the last checkpoint."
        )
        error.origin_rank = 0
        raise error
    if max(free) <= 0:
        return tuple([int(rank not in gone) for rank in range(len(rooms))])
    return _weights(free)


def _free(needs: Needs, layout: Layout, rooms: Sequence[Room]) -> list[int]:
    """What is left for slices, by rank; negative: something that every device has to hold does not fit."""
    return [room.usable_bytes - resident_bytes(needs, layout, counts_copies=room.counts_copies)[0] for room in rooms]


def _weights(free: Sequence[int]) -> tuple[int, ...]:
    """Small numbers in proportion to free memory; equal ones where nothing is free."""
    most = max(free)
    if most <= 0:
        return (1,) * len(free)
    return tuple(max(0, each) * _PRECISION // most for each in free)
