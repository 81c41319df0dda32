"""How much of the gradient each rank should own in the ring, where adding it up is slow on some of them.

The one idea: count what the ring's schedule makes each rank do. Of a gradient whose chunk c_i rank i owns (fractions),
rank i adds everything but the chunk of the rank before it, 1 - c_(i-1), and sends everything twice but its own and the
next rank's chunk, 2 - c_i - c_(i+1). So a rank is spared additions by a large chunk just *before* it, and what it sends
hardly depends on any of this: chunks pay where adding, not sending, is what takes the time.
"""

from collections.abc import Sequence
from itertools import permutations

import msgspec

PARTS_PER_RANK = 12
_LEAST_GAIN = 0.02


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Chunk weights by rank, and what they are predicted to save."""

    weights: tuple[int, ...]
    predicted_s: float
    """Seconds of the busiest rank's ring work for one gradient."""
    equal_s: float
    """The same with equal chunks."""
    reason: str


def ring_work_s(weights: Sequence[int], add_s: Sequence[float], send_s: Sequence[float]) -> list[float]:
    """Return each rank's seconds of adding and sending, for chunks in proportion to `weights`."""
    total = sum(weights)
    ranks = range(len(weights))
    return [
        add_s[rank] * (1 - weights[rank - 1] / total)
        + send_s[rank] * (2 - (weights[rank] + weights[(rank + 1) % len(weights)]) / total)
        for rank in ranks
    ]


def chunk_weights(add_s: Sequence[float], send_s: Sequence[float]) -> ChunkChoice:
    """Return the chunk weights that spare the busiest rank most.

    `add_s[i]` is rank i's seconds to add a whole gradient to another, `send_s[i]` those to send a whole gradient to
    rank i + 1. From equal chunks, one part at a time moves to where it makes the busiest ranks less busy, until no
    move does; equal chunks stay unless the gain is at least 2 %.
    """
    world_size = len(add_s)
    assert world_size == len(send_s) >= 1, f"{world_size} and {len(send_s)} ranks"
    equal = (1,) * world_size
    equal_s = max(ring_work_s(equal, add_s, send_s)) if world_size > 1 else 0.0
    weights = _spare_the_busiest(add_s, send_s) if world_size > 1 else equal
    predicted_s = max(ring_work_s(weights, add_s, send_s)) if world_size > 1 else 0.0
    if predicted_s >= (1 - _LEAST_GAIN) * equal_s:
        return ChunkChoice(
            weights=equal, predicted_s=equal_s, equal_s=equal_s, reason="equal chunks: no others save 2 % of the ring"
        )
    slowest = max(range(world_size), key=lambda rank: (add_s[rank], -rank))
    return ChunkChoice(
        weights=tuple(weights),
        predicted_s=predicted_s,
        equal_s=equal_s,
        reason=(
            f"chunks {', '.join(map(str, weights))}: rank {slowest} needs {add_s[slowest] * 1000:.3g} ms to add a "
            f"gradient and now adds {1 - weights[slowest - 1] / sum(weights):.0%} of it; "
            f"ring {equal_s:.3g} -> {predicted_s:.3g} s"
        ),
    )


def _spare_the_busiest(add_s: Sequence[float], send_s: Sequence[float]) -> tuple[int, ...]:
    weights = [PARTS_PER_RANK] * len(add_s)
    busy = sorted(ring_work_s(weights, add_s, send_s), reverse=True)
    while True:
        moves = []
        for giver, taker in permutations(range(len(weights)), 2):
            if weights[giver]:
                moved = [weight - (rank == giver) + (rank == taker) for rank, weight in enumerate(weights)]
                moves.append((sorted(ring_work_s(moved, add_s, send_s), reverse=True), moved))
        best = min(moves)
        if best[0] >= busy:
            return tuple(weights)
        busy, weights = best
