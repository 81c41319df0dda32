"""How a step goes in which ranks pull the last part of everybody's share from one pool.

The one idea: with few ranks every claim is played through with production's own rules; with many, each unit goes to the
rank that would end it first, which is what the rules come near to (`tests/sim/test_pulled.py` says how near).
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragtag.control.pulling import accepts, claim_size

_BISECTIONS = 40


def play_claims(
    planned: Sequence[int], pool: int, start_s: Sequence[float], unit_s: Sequence[float], usual_unit_s: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return how many units each rank computed, and when it was done.

    Args:
        planned: units outside the pool, by rank.
        pool: units in the pool.
        start_s: when each rank begins with its first unit.
        unit_s: seconds of a unit in this step.
        usual_unit_s: what the ranks believe of each other; 0 for ranks without work.
    """
    ranks = range(len(planned))
    per_s = [1 / seconds if seconds > 0 else 0.0 for seconds in usual_unit_s]
    done = list(planned)
    busy_until = [start_s[rank] + planned[rank] * unit_s[rank] for rank in ranks]
    # A rank claims when it begins its last planned unit or the units it claimed before.
    queue = [
        (busy_until[rank] - min(1, planned[rank]) * unit_s[rank], rank, min(1, planned[rank]))
        for rank in ranks
        if usual_unit_s[rank] > 0
    ]
    heapq.heapify(queue)
    while queue and pool:
        now_s, rank, current = heapq.heappop(queue)
        elapsed_s = now_s - start_s[rank]
        own_unit_s = unit_s[rank] if done[rank] > current else usual_unit_s[rank]
        count = claim_size(pool, per_s[rank] / sum(per_s))
        left = [max(0.0, units - elapsed_s * speed) for units, speed in zip(planned, per_s)]
        while not accepts(
            rank=rank,
            remaining=pool,
            count=count,
            own_left_s=current * own_unit_s,
            own_unit_s=own_unit_s,
            unit_s=usual_unit_s,
            planned_left=left,
        ):
            count //= 2
            if not count:
                break
        if count:
            pool -= count
            done[rank] += count
            heapq.heappush(queue, (max(now_s, busy_until[rank]), rank, count))
            busy_until[rank] += count * unit_s[rank]
    return done, busy_until


def drain(
    ends_s: NDArray[np.float64], unit_s: NDArray[np.float64], pool: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return how many units of the pool each rank takes, and when it is done, by step (rows) and rank.

    Each unit goes to the rank that would end it first. Found by bisection over the time at which `pool` units are done.

    Args:
        ends_s: when each rank is done with what is outside the pool; infinite for ranks that take nothing.
        unit_s: seconds of a unit.
        pool: number of units.
    """

    def taken(until_s: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.floor(np.maximum(until_s[:, None] - ends_s, 0.0) / unit_s)

    low = np.zeros(len(ends_s))
    # The rank that would end the whole pool first by itself.
    high = (ends_s + (pool + 1) * unit_s).min(axis=1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        enough = taken(middle).sum(axis=1) >= pool
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    counts = taken(high)
    for row, excess in enumerate((counts.sum(axis=1) - pool).astype(int)):
        # Units that end at the same time as the last one that is needed.
        if excess > 0:
            last = np.where(counts[row] > 0, ends_s[row] + counts[row] * unit_s[row], -np.inf)
            counts[row, np.argsort(-last, kind="stable")[:excess]] -= 1
    busy_s = np.where(counts > 0, counts * unit_s, 0.0)
    return counts.astype(np.int64), ends_s + busy_s
