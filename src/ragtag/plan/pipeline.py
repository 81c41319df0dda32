"""Uneven pipelines: where to cut the model, and which devices hold a stage.

The one idea: with devices in a fixed order, the best first cuts do not depend on the later ones, so a dynamic program
over (device, first block) finds the cuts with the least slowest stage (Narayanan et al., "PipeDream", 2019, section 3).
Micro-batches are few where memory is little, and then filling the pipeline counts as well: the same program finds the
quickest one through which no stage takes longer than a limit, for some limits above the least.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, permutations
from math import inf
from typing import NamedTuple

import msgspec

from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.comm import send_s
from ragtag.cost.device import curve
from ragtag.cost.pipeline import folded, state_bytes
from ragtag.cost.problem import Problem
from ragtag.cost.step import predict_on

_MOST_DEVICES = 24
_ALL_ORDERS = 4
"""Up to so many devices, all orders are tried."""
_LIMITS = (1.0, 1.05, 1.15, 1.3, 1.6, 2.0, inf)
"""How much slower than the least the slowest stage may be, for a pipeline that fills sooner."""
_SMALL = 20_000
"""Up to so many states of the program, all limits are tried; else the first."""


def pipelines(problem: Problem, *, micro_batch: int | None = None) -> Candidate | None:
    """Return the best pipeline over orders and micro-batch sizes; None: blocks were not measured, or nothing fits.

    Orders are the cluster file's, and fastest first; all of few devices. Of large clusters the fastest 24 devices are
    looked at.

    Args:
        micro_batch: samples; None: the best of some.
    """
    problem = msgspec.structs.replace(problem, blocks=folded(problem.blocks))
    if len(problem.blocks) < 2:
        return None
    by_speed = sorted(range(len(problem.ranks)), key=lambda rank: (curve(problem.alike[rank]).at(8), rank))
    chosen = by_speed[:_MOST_DEVICES]
    orders = dict.fromkeys((tuple(sorted(chosen)), tuple(chosen)))
    if len(chosen) <= _ALL_ORDERS:
        orders |= dict.fromkeys(permutations(chosen))
    best: tuple[float, Candidate] | None = None
    for order in orders:
        for size in (micro_batch,) if micro_batch is not None else _sizes(problem):
            for candidate in _cuts(problem, order, size):
                step_s = predict_on(problem, candidate).step_s
                if best is None or step_s < best[0]:
                    best = (step_s, candidate)
    return None if best is None else best[1]


def _sizes(problem: Problem) -> Iterator[int]:
    size = problem.model.unit
    while size <= problem.global_batch_size:
        yield size
        size *= 2


class _Stage(NamedTuple):
    """One device with some blocks, for one micro-batch."""

    own_s: float
    sent_s: float

    @property
    def beat_s(self) -> float:
        return max(self.own_s, self.sent_s)


def _cuts(problem: Problem, order: Sequence[int], micro_batch: int) -> Iterator[Candidate]:
    """Give the pipelines worth pricing: the one with the least slowest stage, and those that fill sooner."""
    stage_of = _stages(problem, order, micro_batch)
    num_devices, num_blocks = len(order), len(problem.blocks)
    least = _program(num_devices, num_blocks, stage_of, limit_s=inf, worst=True)
    if least is None:
        return
    seen = {least.cuts}
    yield _candidate(problem, order, least.cuts, micro_batch)
    if num_devices * num_blocks**2 > _SMALL:
        return
    for factor in _LIMITS:
        found = _program(num_devices, num_blocks, stage_of, limit_s=factor * least.value * (1 + 1e-9), worst=False)
        if found is not None and found.cuts not in seen:
            seen.add(found.cuts)
            yield _candidate(problem, order, found.cuts, micro_batch)


def _stages(problem: Problem, order: Sequence[int], micro_batch: int) -> Callable[[int, int, int], _Stage | None]:
    """Return what says how long the device at a place takes with blocks first .. stop - 1; None: it cannot."""
    blocks, devices = problem.blocks, [problem.alike[rank] for rank in order]
    hosts = [problem.ranks[rank].host for rank in order]
    num_micro_batches = -(-problem.global_batch_size // micro_batch)
    times = [0.0, *accumulate(block.forward_s + block.backward_s for block in blocks)]
    kept = [0, *accumulate(block.activation_bytes for block in blocks)]
    state = [0, *accumulate(state_bytes(problem, (block,)) for block in blocks)]
    whole_s = [curve(device).at(micro_batch) / times[-1] for device in devices]

    def stage_of(index: int, first: int, stop: int) -> _Stage | None:
        if stop - first == len(blocks):
            return None  # a single stage is no pipeline
        capacity = devices[index].capacity_bytes
        if capacity is not None:
            in_flight = min(num_micro_batches, len(order) - index) * micro_batch
            if state[stop] - state[first] + in_flight * (kept[stop] - kept[first]) > capacity:
                return None
        own_s = whole_s[index] * (times[stop] - times[first])
        sent_s = 0.0
        if stop < len(blocks) and index + 1 < len(order):
            size = blocks[stop - 1].output_bytes * micro_batch
            sent_s = send_s(size, hosts[index], hosts[index + 1], problem.link)
        return _Stage(own_s, sent_s)

    return stage_of


class _Found(NamedTuple):
    value: float
    cuts: tuple[int, ...]
    """By device, the block after its last one."""


def _program(
    num_devices: int,
    num_blocks: int,
    stage_of: Callable[[int, int, int], _Stage | None],
    *,
    limit_s: float,
    worst: bool,
) -> _Found | None:
    """Return the cuts with the least slowest stage (`worst`), or with the least time from end to end, of those whose
    stages all stay within `limit_s`; None: there are none. Devices may be passed over."""
    # least[b]: of what devices index.. make of blocks b.. . following[i][b]: where the stage of i ends.
    least = [inf] * num_blocks + [0.0]
    following = []
    for index in range(num_devices - 1, -1, -1):
        now, ends = list(least), list(range(num_blocks + 1))
        for first in range(num_blocks):
            for stop in range(first + 1, num_blocks + 1):
                stage = stage_of(index, first, stop)
                if stage is None or stage.own_s > limit_s:
                    break
                if worst and stage.own_s >= now[first]:
                    break
                if stage.sent_s > limit_s:
                    continue
                rest = least[stop]
                value = max(stage.beat_s, rest) if worst else stage.own_s + 2 * stage.sent_s + rest
                if value < now[first]:
                    now[first], ends[first] = value, stop
        least = now
        following.append(ends)
    if least[0] == inf:
        return None
    cuts, first = [], 0
    for ends in reversed(following):
        first = ends[first]
        cuts.append(first)
    return _Found(least[0], tuple(cuts))


def _candidate(problem: Problem, order: Sequence[int], cuts: Sequence[int], micro_batch: int) -> Candidate:
    parts, first = [], 0
    for rank, stop in zip(order, cuts):
        if stop > first:
            parts.append(
                Part(
                    device=problem.ranks[rank].name,
                    samples=problem.global_batch_size,
                    micro_batch=micro_batch,
                    blocks=(first, stop),
                )
            )
            first = stop
    inside = {part.device for part in parts}
    return Candidate(
        name="uneven pipeline",
        layout="pipeline",
        parts=tuple(parts),
        left_out=tuple(rank.name for rank in problem.ranks if rank.name not in inside),
        unit=problem.model.unit,
    )
