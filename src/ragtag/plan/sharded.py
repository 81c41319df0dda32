"""Uneven ZeRO: model state cut into slices by free memory, work shared out by speed, each for itself.

The one idea: a slow card with much memory can hold state and compute nothing. All ranks compute the same number of
micro-batches (gathers are collective), so that number is tried out and everything else follows from it.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from ragtag.core.quantities import format_bytes
from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.device import largest_micro_batch, memory_bytes
from ragtag.cost.problem import Problem
from ragtag.cost.reduction import bucket_rings_s, lines
from ragtag.cost.step import passing_bytes, predict_on, sharded_bytes
from ragtag.plan.allocate import Seat, allocate
from ragtag.plan.load import NOTHING_TO_REDUCE, Load, Option
from ragtag.plan.subset import Subset

_MOST_MICRO_BATCHES = 64


class Slices(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage fares on some ranks: the candidate, or why there is none."""

    candidate: Candidate | None = None
    why_not: str = ""


def zero(problem: Problem, stage: int, subset: Subset) -> Slices:
    """Return the best candidate of ZeRO `stage` in which all ranks of `subset` take part."""
    layout = f"zero-{stage}"
    sharded = sharded_bytes(problem, layout)
    devices = [problem.alike[rank] for rank in subset]
    if not sharded:
        return Slices(why_not="the profile says nothing about parameters and optimizer state")
    if any(device.memory is None for device in devices):
        return Slices(why_not="the memory of some devices was not measured")
    unit, batch = problem.model.unit, problem.global_batch_size
    num_units = -(-batch // unit)
    passing = passing_bytes(problem, layout)
    resident = [
        max(device.memory.fixed_bytes - sharded, 0) + passing for device in devices if device.memory is not None
    ]
    # Half of an all-reduce is behind the backward, the other half after the optimizer.
    rings_s = [ring_s / 2 for ring_s in bucket_rings_s(problem, [problem.ranks[rank].host for rank in subset])]
    hides = stage == 1 and len(subset) > 1
    best: tuple[float, Candidate] | None = None
    shortage, hint_s = inf, 0.0
    pieces = 1 if unit == 1 else num_units
    while pieces <= max(_MOST_MICRO_BATCHES, num_units if unit > 1 else 0):
        caps = [largest_micro_batch(device, fixed_bytes=kept) for device, kept in zip(devices, resident)]
        kinds: dict[tuple[int, int | None], Seat] = {}
        seats = []
        for device, cap in zip(devices, caps):
            key = (id(device), cap)
            if key not in kinds:
                fits = cap is None or cap >= unit
                load = Load(
                    device,
                    (Option(micro_batch=None, pieces=pieces),) if fits else (),
                    limit=None if cap is None or unit > 1 else cap * pieces,
                    unit=unit,
                    constant_s=device.fixed_s + device.optimizer_s / len(devices),
                    hides=hides,
                )
                kinds[key] = Seat(load=load, lines=lines(problem, device, rings_s) if hides else NOTHING_TO_REDUCE)
            seats.append(kinds[key])
        shared = allocate(num_units, seats, hint_s=hint_s)
        if shared is not None:
            hint_s = shared[1]
            candidate, missing = _candidate(problem, layout, subset, shared[0], pieces, resident, sharded)
            shortage = min(shortage, missing)
            if candidate is not None:
                step_s = predict_on(problem, candidate).step_s
                if best is None or step_s < best[0]:
                    best = (step_s, candidate)
        pieces *= 2
        if unit > 1 or pieces > num_units:
            break
    if best is None:
        lacking = f"{format_bytes(shortage)} too few" if shortage < inf else "not even one sample fits anywhere"
        return Slices(why_not=f"all devices together have too little memory: {lacking}")
    return Slices(candidate=best[1])


def _candidate(
    problem: Problem,
    layout: str,
    subset: Subset,
    units: Sequence[int],
    pieces: int,
    resident: Sequence[int],
    sharded: int,
) -> tuple[Candidate | None, float]:
    """Return (candidate, 0), or (None, bytes that are missing)."""
    unit, batch = problem.model.unit, problem.global_batch_size
    sizes, samples, start = [], [], 0
    for count in units:
        share = min(start + count * unit, batch) - start
        start += share
        samples.append(share)
        sizes.append(unit if unit > 1 else max(-(-share // pieces), 1))
    free = []
    for rank, kept, share, size in zip(subset, resident, samples, sizes):
        device = problem.alike[rank]
        needed = memory_bytes(device, min(size, share), fixed_bytes=kept)
        assert needed is not None, f"{device.name} has no memory curve"
        free.append(inf if device.capacity_bytes is None else device.capacity_bytes - needed)
    short = -sum(room for room in free if room < 0)
    room = sum(max(room, 0) for room in free)
    if short or room < sharded:
        return None, short or sharded - room
    slices = _slices(sharded, free)
    parts = tuple(
        Part(device=problem.ranks[rank].name, samples=share, micro_batch=size, state_bytes=held)
        for rank, share, size, held in zip(subset, samples, sizes, slices)
    )
    inside = set(subset)
    return Candidate(
        name=f"uneven ZeRO-{layout[-1]}",
        layout=layout,  # pyright: ignore[reportArgumentType]
        parts=parts,
        left_out=tuple(rank.name for index, rank in enumerate(problem.ranks) if index not in inside),
        unit=unit,
    ), 0.0


def _slices(total: int, free: Sequence[float]) -> list[int]:
    """Cut `total` bytes in proportion to free memory, equally over devices without a limit; never more than is free."""
    unlimited = [index for index, room in enumerate(free) if room == inf]
    if unlimited:
        weights = [1.0 if room == inf else 0.0 for room in free]
    else:
        weights = [max(room, 0.0) for room in free]
    whole = sum(weights)
    slices = [int(total * weight / whole) for weight in weights]
    left = total - sum(slices)
    for index, room in enumerate(free):
        taken = min(left, int(min(room, total)) - slices[index]) if weights[index] else 0
        slices[index] += taken
        left -= taken
    assert left == 0, f"{left} of {total} bytes are in no slice"
    return slices
