"""The shares that end the last rank's work earliest, found from the shares there are.

The one idea: dealing pieces out one by one gives every rank its cheapest ones, so any other shares become the same by
moving pieces, each from where it ends latest to where it would end earliest. Where speeds hardly changed, that is a few
moves or none, however large the batch.
"""

import heapq
from collections.abc import Callable, Sequence

from ragtag.core.errors import SettingError


def move_pieces(
    total: int, times: Sequence[Callable[[int], int]], caps: Sequence[int], start: Sequence[int]
) -> tuple[int, ...]:
    """Return `plan.apportion.apportion_times(total, times, caps)`, ties included, starting from `start`.

    `times[i](n)` is rank i's time for n pieces, in whole microseconds, and must not decrease with n. `start` need not
    sum to `total` nor keep to `caps`.

    Raises:
        SettingError: `total` does not fit under the caps.
    """
    if sum(caps) < total:
        raise SettingError(
            f"{total} do not fit: {len(caps)} ranks have room for {sum(caps)}, {total - sum(caps)} too few. "
            f"Make the global batch smaller, or raise the caps (a smaller micro-batch needs less memory)."
        )
    counts = [min(count, cap) for count, cap in zip(start, caps, strict=True)]
    missing = total - sum(counts)
    # A rank that took a piece never gives one, nor the other way round: neither heap need hear of the other's moves.
    takers = [
        (time(count + 1), rank) for rank, (time, count, cap) in enumerate(zip(times, counts, caps)) if count < cap
    ]
    givers = [(-time(count), -rank) for rank, (time, count) in enumerate(zip(times, counts)) if count]
    heapq.heapify(takers)
    heapq.heapify(givers)
    while missing or (takers and givers and takers[0] < (-givers[0][0], -givers[0][1])):
        if missing <= 0:
            rank = -givers[0][1]
            counts[rank] -= 1
            missing += 1
            if counts[rank]:
                heapq.heapreplace(givers, (-times[rank](counts[rank]), -rank))
            else:
                heapq.heappop(givers)
        if missing > 0:
            rank = takers[0][1]
            counts[rank] += 1
            missing -= 1
            if counts[rank] < caps[rank]:
                heapq.heapreplace(takers, (times[rank](counts[rank] + 1), rank))
            else:
                heapq.heappop(takers)
    return tuple(counts)
