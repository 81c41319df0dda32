"""How much of the gradient each rank owns in the ring, where a rank's processor is what the ring waits for.

The one idea: count what the ring's schedule makes each rank do. Of a gradient whose chunk c_i rank i owns (fractions),
rank i adds 1 - c_(i-1), sends 2 - c_i - c_(i+1) and receives 2 - c_(i-1) - c_i. So a rank is spared most by owning
*more*: a large chunk of its own passes it once each way instead of twice. (What a processor pays for is the traffic;
adding is a fifth of it.) All ranks' work together stays the same, and the busiest link gets more to carry, so this pays
only for a rank that the whole step waits for and that has no samples left to give away.
"""

from collections.abc import Sequence

import msgspec

from ragtag.control.robust import appended, median
from ragtag.plan.apportion import apportion

PARTS_PER_RANK = 12
_LEVELS = 12
_ROUNDS = 8
_BELIEVED = 0.4
"""Part of the saving by this model that is believed. Measured with CPU quotas of 30, 30 and 6 % and 9.8 M parameters:
11 % of the step by the model, 4 % by the clock. Whatever a process does while it waits is counted as traffic."""
ROWS = 16
"""Steps from which is known what the ring costs: chosen by the older half of them, judged by the newer."""


class RingStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the ring cost in one step, or usually; tuples are by rank."""

    add_s: tuple[float, ...]
    """Seconds of adding a whole gradient to another."""
    send_s: tuple[float, ...]
    """Seconds that sending as much as a gradient takes a rank's processor; receiving takes as long."""
    comm_s: float
    """Seconds that even the last rank to finish its own work waited for the sum."""


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Chunk weights by rank, and what they are predicted to save."""

    weights: tuple[int, ...]
    saved_s: float
    """Seconds of a step less than under the weights there are; 0: those are the best ones."""


def remember(steps: tuple[RingStep, ...], step: RingStep) -> tuple[RingStep, ...]:
    """Return `steps` with one more behind, `ROWS` at most; a step in which somebody measured nothing is left out."""
    return appended(steps, step, ROWS) if step.send_s and min(step.send_s) > 0 else steps


def usual(steps: Sequence[RingStep]) -> RingStep:
    """Return the medians over `steps`."""
    return RingStep(
        add_s=tuple(map(median, zip(*(step.add_s for step in steps)))),
        send_s=tuple(map(median, zip(*(step.send_s for step in steps)))),
        comm_s=median([step.comm_s for step in steps]),
    )


def parts_of(weights: Sequence[int], rank: int) -> tuple[float, float]:
    """Return how many gradients `rank` adds (at most 1), and how many it sends and receives together."""
    total, own, before, after = sum(weights), weights[rank], weights[rank - 1], weights[(rank + 1) % len(weights)]
    return 1 - before / total, 4 - (before + 2 * own + after) / total


def ring_work_s(weights: Sequence[int], add_s: Sequence[float], send_s: Sequence[float]) -> list[float]:
    """Return each rank's seconds of adding, sending and receiving, for chunks in proportion to `weights`."""
    work_s = []
    for rank, (add, send) in enumerate(zip(add_s, send_s, strict=True)):
        adds, travels = parts_of(weights, rank)
        work_s.append(add * adds + send * travels)
    return work_s


def choose_chunks(chosen_by: RingStep, judged_by: RingStep, work_s: Sequence[float], now: Sequence[int]) -> ChunkChoice:
    """Return the chunk weights that end the step earliest, and what they save.

    A step ends when the last rank has done its own work, `work_s`, and the ring's. What the ring takes beyond its
    busiest processor is the links', and grows with what the busiest link carries. Weights are searched with what
    `chosen_by` says, from equal ones, by giving one rank more or less and the others what is left in proportion; what
    they save is told by `judged_by`, of other steps, so that noise does not count as a gain. Every rank keeps a part.
    """
    world_size = len(now)
    assert world_size == len(work_s) == len(judged_by.add_s) > 1, f"{world_size} and {len(work_s)} ranks"
    weights = _search(chosen_by, work_s, now)
    saved_s = _step_s(now, work_s, judged_by, now) - _step_s(weights, work_s, judged_by, now)
    if saved_s <= 0:
        return ChunkChoice(weights=tuple(now), saved_s=0.0)
    return ChunkChoice(weights=weights, saved_s=_BELIEVED * saved_s)


def last_rank(ring: RingStep, work_s: Sequence[float], now: Sequence[int]) -> int:
    """Return the rank that everybody waits for."""
    return _busiest(_ends(now, work_s, ring))


def most_saved_s(ring: RingStep, work_s: Sequence[float], now: Sequence[int]) -> float:
    """Return an upper bound of what any chunks can save: a gradient passes every rank at least once each way, and the
    links carry at least what they carry under equal chunks."""
    ends = _ends(now, work_s, ring)
    least = [work + 2 * send for work, send in zip(work_s, ring.send_s)]
    busiest = _busiest(ends)
    link_s = _link_s(ring, now) * (1 - _busiest_link((1,) * len(now)) / _busiest_link(now))
    return _BELIEVED * (ends[busiest] - least[busiest] + max(0.0, link_s))


def _ends(weights: Sequence[int], work_s: Sequence[float], ring: RingStep) -> list[float]:
    return [work + own for work, own in zip(work_s, ring_work_s(weights, ring.add_s, ring.send_s))]


def _busiest(ends: Sequence[float]) -> int:
    return max(range(len(ends)), key=lambda rank: (ends[rank], -rank))


def _busiest_link(weights: Sequence[int]) -> float:
    """How many gradients the busiest link carries: 2 (n - 1) / n for equal weights, 2 at most."""
    total = sum(weights)
    return max([2 - (own + after) / total for own, after in zip(weights, (*weights[1:], weights[0]))])


def _link_s(ring: RingStep, now: Sequence[int]) -> float:
    """Seconds of the ring that no processor accounts for."""
    return max(0.0, ring.comm_s - max(ring_work_s(now, ring.add_s, ring.send_s)))


def _step_s(weights: Sequence[int], work_s: Sequence[float], ring: RingStep, now: Sequence[int]) -> float:
    link_s = _link_s(ring, now) * _busiest_link(weights) / _busiest_link(now)
    return max(_ends(weights, work_s, ring)) + link_s


def _search(ring: RingStep, work_s: Sequence[float], now: Sequence[int]) -> tuple[int, ...]:
    world_size = len(now)
    total = PARTS_PER_RANK * world_size
    most = total - world_size + 1

    def cost(weights: Sequence[int]) -> tuple[float, ...]:
        # Where the step stays the same, what makes the other ranks less busy still counts.
        ends = sorted(_ends(weights, work_s, ring), reverse=True)
        return (_step_s(weights, work_s, ring, now), *ends)

    best: tuple[int, ...] = (PARTS_PER_RANK,) * world_size
    least = cost(best)
    for _ in range(_ROUNDS):
        busiest = _busiest(_ends(best, work_s, ring))
        candidates = [
            _with(best, rank, 1 + (most - 1) * level // _LEVELS)
            for rank in sorted({(busiest - 1) % world_size, busiest, (busiest + 1) % world_size})
            for level in range(_LEVELS + 1)
        ]
        costs, weights = min((cost(weights), weights) for weights in candidates)
        if costs >= least:
            break
        least, best = costs, weights
    return best


def _with(weights: Sequence[int], rank: int, parts: int) -> tuple[int, ...]:
    """`weights` with `parts` for `rank`, and the rest for the others in proportion, at least 1 each."""
    left = sum(weights) - parts - (len(weights) - 1)
    others = apportion(left, [0 if other == rank else weight for other, weight in enumerate(weights)])
    return tuple(parts if other == rank else 1 + more for other, more in enumerate(others))
