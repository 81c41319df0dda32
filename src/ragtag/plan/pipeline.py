"""Uneven pipelines: where to cut the model, and which devices hold a stage.

The one idea: with devices in a fixed order, the best first cuts do not depend on the later ones, so a dynamic program
over (device, first block) finds the cuts with the least slowest stage (Narayanan et al., "PipeDream", 2019, section 3).
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.comm import send_s
from ragtag.cost.device import curve
from ragtag.cost.pipeline import state_bytes
from ragtag.cost.problem import Problem
from ragtag.cost.step import predict_on

_MOST_DEVICES = 24


def pipelines(problem: Problem) -> Candidate | None:
    """Return the best pipeline over orders and micro-batch sizes; None: blocks were not measured, or nothing fits.

    Orders are the cluster file's, and fastest first. Of large clusters the fastest 24 devices are looked at.
    """
    if not problem.blocks:
        return None
    batch = problem.global_batch_size
    by_speed = sorted(range(len(problem.ranks)), key=lambda rank: (curve(problem.alike[rank]).at(8), rank))
    chosen = by_speed[:_MOST_DEVICES]
    best: tuple[float, Candidate] | None = None
    for order in dict.fromkeys((tuple(sorted(chosen)), tuple(chosen))):
        size = problem.model.unit
        while size <= batch:
            candidate = _cut(problem, order, size)
            if candidate is not None:
                step_s = predict_on(problem, candidate).step_s
                if best is None or step_s < best[0]:
                    best = (step_s, candidate)
            size *= 2
    return None if best is None else best[1]


def _cut(problem: Problem, order: Sequence[int], micro_batch: int) -> Candidate | None:
    blocks, devices = problem.blocks, [problem.alike[rank] for rank in order]
    hosts = [problem.ranks[rank].host for rank in order]
    num_blocks, num_devices = len(blocks), len(devices)
    num_micro_batches = -(-problem.global_batch_size // micro_batch)
    times = [0.0, *accumulate(block.forward_s + block.backward_s for block in blocks)]
    kept = [0, *accumulate(block.activation_bytes for block in blocks)]
    state = [0, *accumulate(state_bytes(problem, (block,)) for block in blocks)]
    # beat[i][b]: the least slowest stage when devices i.. hold blocks b..; following[i][b]: where the stage of i ends.
    beat = [[inf] * num_blocks + [0.0] for _ in range(num_devices + 1)]
    following: list[list[int]] = [[0] * (num_blocks + 1) for _ in range(num_devices + 1)]
    for index in range(num_devices - 1, -1, -1):
        whole_s = curve(devices[index]).at(micro_batch)
        in_flight = min(num_micro_batches, num_devices - index) * micro_batch
        capacity = devices[index].capacity_bytes
        for first in range(num_blocks):
            least, end = beat[index + 1][first], first
            for stop in range(first + 1, num_blocks + 1):
                own_s = whole_s * (times[stop] - times[first]) / times[-1]
                if own_s >= least:
                    break
                needed = state[stop] - state[first] + in_flight * (kept[stop] - kept[first])
                if capacity is not None and needed > capacity:
                    break
                sent_s = 0.0
                if stop < num_blocks and index + 1 < num_devices:
                    output = blocks[stop - 1].output_bytes * micro_batch
                    sent_s = send_s(output, hosts[index], hosts[index + 1], problem.link)
                slowest = max(own_s, sent_s, beat[index + 1][stop])
                if slowest < least:
                    least, end = slowest, stop
            beat[index][first], following[index][first] = least, end
    if beat[0][0] == inf:
        return None
    parts, first = [], 0
    for index, rank in enumerate(order):
        stop = following[index][first]
        if first < num_blocks and stop > first:
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
        not_yet="pipelines",
    )
