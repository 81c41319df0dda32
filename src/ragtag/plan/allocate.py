"""Shares for unequal ranks so that the complete sum is there earliest, for thousands of them.

The one idea: the same rule as `apportion_times`, each unit to the rank that would end first with it. But all units
that end before some time are given at once, so only the last few are dealt out one by one.
"""

import heapq
from collections.abc import Sequence

import msgspec

from ragtag.cost.reduction import Line
from ragtag.plan.load import NOTHING_TO_REDUCE, Load

_BISECTIONS = 60


class Seat(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A rank's place in a step: its load, and what reduction adds (`cost.reduction.lines`)."""

    load: Load
    lines: tuple[Line, ...] = NOTHING_TO_REDUCE


def allocate(total: int, seats: Sequence[Seat], *, hint_s: float = 0.0) -> tuple[tuple[int, ...], float] | None:
    """Return (units by seat, seconds until the sum is complete), or None where `total` units do not fit.

    Optimal, because a load's `end_s` never falls with its units. Ties go to the earlier seat. `hint_s` is a guess of
    the seconds; it changes nothing but the time to find them.
    """
    groups: dict[tuple[int, tuple[Line, ...]], list[int]] = {}
    for index, seat in enumerate(seats):
        groups.setdefault((id(seat.load), seat.lines), []).append(index)
    members = list(groups.values())
    kinds = [seats[member[0]] for member in members]
    guesses = [max(1, total // len(seats))] * len(kinds)

    def fill(until_s: float) -> tuple[list[int], int]:
        counts = [seat.load.most(until_s, seat.lines, guess=guess, total=total) for seat, guess in zip(kinds, guesses)]
        return counts, sum(count * len(member) for count, member in zip(counts, members))

    room = sum(
        len(member) * (total if seat.load.limit is None else min(total, seat.load.limit // seat.load.unit))
        for seat, member in zip(kinds, members)
    )
    if room < total:
        return None
    low_s, high_s = (
        0.0,
        hint_s or max(seat.load.end_s(guesses[0], seat.lines) for seat in kinds if seat.load.limit != 0),
    )
    counts, given = [0] * len(kinds), 0
    found, number = fill(high_s)
    while number < total:
        low_s, counts, given, guesses = high_s, found, number, found
        high_s *= 1.25 if hint_s else 2
        found, number = fill(high_s)
    for _ in range(_BISECTIONS):
        if total - given <= len(seats) or high_s - low_s <= 1e-12 * high_s:
            break
        middle_s = low_s + (high_s - low_s) * 0.5
        found, number = fill(middle_s)
        guesses = found
        if number <= total:
            low_s, counts, given = middle_s, found, number
        else:
            high_s = middle_s
    return _deal_rest(total - given, seats, kinds, members, counts)


def _deal_rest(
    left: int, seats: Sequence[Seat], kinds: Sequence[Seat], members: Sequence[list[int]], counts: Sequence[int]
) -> tuple[tuple[int, ...], float]:
    units = [0] * len(seats)
    queue: list[tuple[float, int]] = []
    latest_s = 0.0
    for seat, member, count in zip(kinds, members, counts):
        latest_s = max(latest_s, seat.load.end_s(count, seat.lines))
        following = _next_s(seat, count) if left else None
        for index in member:
            units[index] = count
            if following is not None:
                queue.append((following, index))
    heapq.heapify(queue)
    for _ in range(left):
        end_s, index = queue[0]
        units[index] += 1
        latest_s = max(latest_s, end_s)
        following = _next_s(seats[index], units[index])
        if following is None:
            heapq.heappop(queue)
        else:
            heapq.heapreplace(queue, (following, index))
    return tuple(units), latest_s


def _next_s(seat: Seat, units: int) -> float | None:
    limit = seat.load.limit
    if limit is not None and (units + 1) * seat.load.unit > limit:
        return None
    return seat.load.end_s(units + 1, seat.lines)
