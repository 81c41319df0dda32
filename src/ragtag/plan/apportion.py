"""Dealing out a whole number of samples or units to unequal ranks, in exact integers.

The one idea: give each piece in turn to the rank that would be done with it first. For nondecreasing times that
minimises the time of the last rank to finish, and because only integers are compared, every host computes the same.
"""

import heapq
from collections.abc import Callable, Sequence
from fractions import Fraction

from ragtag.core.errors import SettingError


def apportion(total: int, weights: Sequence[int], caps: Sequence[int | None] | None = None) -> tuple[int, ...]:
    """Split `total` in proportion to `weights`, at most `caps[i]` (None: no cap) to rank i.

    Each piece goes to the rank with the least (n + 1) / weight, n being what it has, ties to the lowest rank: it
    minimises the largest n / weight. This is the divisor method of D'Hondt and Jefferson (Balinski and Young, "Fair
    Representation", 1982). A rank of weight 0 gets nothing; weights that sum to `total` come back as they are.

    Raises:
        SettingError: a negative number, lengths that differ, or `total` does not fit under the caps.
    """
    limits = _limits(total, len(weights), caps)
    if any(weight < 0 for weight in weights):
        raise SettingError(f"weights {tuple(weights)} are not valid. Expected whole numbers of at least 0.")
    limits = [limit if weight else 0 for limit, weight in zip(limits, weights, strict=True)]
    _check_fit(total, limits, f"weights {tuple(weights)}")
    counts = _lower_quotas(total, weights, limits)
    queue = [
        (Fraction(count + 1, weight), rank)
        for rank, (count, weight, limit) in enumerate(zip(counts, weights, limits, strict=True))
        if count < limit
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(counts)):
        _, rank = queue[0]
        counts[rank] += 1
        if counts[rank] < limits[rank]:
            heapq.heapreplace(queue, (Fraction(counts[rank] + 1, weights[rank]), rank))
        else:
            heapq.heappop(queue)
    return tuple(counts)


def apportion_times(
    total: int, times: Sequence[Callable[[int], int]], caps: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Split `total` so that the last rank is done earliest; `times[i](n)` is rank i's time for n pieces.

    Times are whole microseconds and must not decrease with n. Each piece goes to the rank with the least
    `times[i](n + 1)`, ties to the lowest rank, which is optimal for any nondecreasing times.

    Raises:
        SettingError: a negative number, lengths that differ, times that decrease, or `total` does not fit.
    """
    limits = _limits(total, len(times), caps)
    _check_fit(total, limits, f"{len(times)} ranks")
    counts = [0] * len(times)
    queue = [(time(1), rank) for rank, (time, limit) in enumerate(zip(times, limits, strict=True)) if limit]
    heapq.heapify(queue)
    for _ in range(total):
        now, rank = queue[0]
        counts[rank] += 1
        if counts[rank] == limits[rank]:
            heapq.heappop(queue)
            continue
        after = times[rank](counts[rank] + 1)
        if after < now:
            raise SettingError(
                f"The times of rank {rank} decrease from {now} to {after} us at {counts[rank] + 1} pieces. "
                f"Expected times that do not decrease."
            )
        heapq.heapreplace(queue, (after, rank))
    return tuple(counts)


def _lower_quotas(total: int, weights: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return counts that piece-by-piece dealing is certain to reach, fewer than one a rank short of `total`.

    The divisor method gives every rank at least its exact share rounded down, and a rank at its cap only leaves more
    to the others, so ranks whose rounded share reaches their cap are settled and the rest share what remains.
    """
    counts = [0] * len(weights)
    open_ranks = [rank for rank, limit in enumerate(limits) if limit]
    while open_ranks:
        weight = sum(weights[rank] for rank in open_ranks)
        quotas = {rank: total * weights[rank] // weight for rank in open_ranks}
        full = [rank for rank in open_ranks if quotas[rank] >= limits[rank]]
        for rank in open_ranks:
            counts[rank] = min(quotas[rank], limits[rank])
        if not full:
            break
        total -= sum(counts[rank] for rank in full)
        open_ranks = [rank for rank in open_ranks if quotas[rank] < limits[rank]]
    return counts


def _limits(total: int, num_ranks: int, caps: Sequence[int | None] | None) -> list[int]:
    if total < 0:
        raise SettingError(f"total = {total} is not valid. Expected a whole number of at least 0.")
    if caps is None:
        return [total] * num_ranks
    if len(caps) != num_ranks or any(cap is not None and cap < 0 for cap in caps):
        raise SettingError(f"caps {tuple(caps)} are not valid. Expected {num_ranks} whole numbers of at least 0.")
    return [total if cap is None else min(cap, total) for cap in caps]


def _check_fit(total: int, limits: Sequence[int], whose: str) -> None:
    room = sum(limits)
    if room < total:
        raise SettingError(
            f"{total} do not fit: {whose} have room for {room}, {total - room} too few. "
            f"Make the global batch smaller, or raise the caps (a smaller micro-batch needs less memory)."
        )
