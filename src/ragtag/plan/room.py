"""Whether some of the devices could be done by a given time, and which of them: the quick question that a search asks.

The one idea: what exchanging gradients costs depends on how many devices of each host take part, not on which. So for
given numbers the best devices are those that do the most by then, and one sum says whether they do enough.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, repeat
from typing import NamedTuple

from ragtag.cost.problem import Problem
from ragtag.cost.reduction import Line
from ragtag.plan.load import Load

_GRID = 256
"""Times are rounded to so many parts of a step, in favour of the devices, so that few of them need to be looked at."""

Counts = tuple[int, ...]
"""How many ranks of each row take part."""


class Row(NamedTuple):
    """Ranks that follow one another on one host; the cost of a ring depends on how many of each row are in it."""

    host: str
    ranks: tuple[int, ...]
    kinds: tuple[tuple[int, ...], ...]
    """The same ranks, equal devices together."""


Rows = Sequence[Row]


class Room:
    """Answers for one step time to beat.

    Args:
        rows: see `Rows`.
        load: what a rank does with a share.
        hidden: the part of a rank's backward that its first bucket's ring can hide behind.
        total: units of a step.
        step_s: seconds that are to be beaten.
    """

    def __init__(
        self, rows: Rows, load: Callable[[int], Load], hidden: Callable[[int], float], total: int, step_s: float
    ) -> None:
        self._rows, self._load, self._hidden, self._total = rows, load, hidden, total
        self._grid_s = step_s / _GRID
        self._step_s = step_s
        self._worked_out = 0
        self._guess = total // sum(len(row.ranks) for row in rows) or 1
        self._most: dict[tuple[int, tuple[int, int, int]], int | None] = {}
        self._orders: dict[tuple[int, tuple[int, int, int]], tuple[list[int], list[int]]] = {}

    def pick(self, counts: Counts, first_s: float, last_s: float, beside_s: float) -> tuple[int, ...] | None:
        """Return the ranks that do the most in time; None: no choice of so many ranks is done earlier than `step_s`.

        Args:
            counts: ranks of each row.
            first_s: seconds that reducing takes after the first bucket is complete.
            last_s: and after the last one.
            beside_s: what comes on top, the vote.
        """
        grid_s = self._grid_s
        until = -int((beside_s - self._step_s) // grid_s)
        if until <= 0:
            return None
        times = (until, int(first_s / grid_s), int(last_s / grid_s))
        done = 0
        for row, count in enumerate(counts):
            if count:
                _, sums = self._order(row, times)
                if count >= len(sums):
                    return None
                done += sums[count]
        if done < self._total:
            return None
        chosen = [rank for row, count in enumerate(counts) if count for rank in self._order(row, times)[0][:count]]
        return tuple(sorted(chosen))

    def worked_out(self) -> int:
        """Return for how many kinds of devices something had to be worked out since this was last asked."""
        number, self._worked_out = self._worked_out, 0
        return number

    def _order(self, row: int, times: tuple[int, int, int]) -> tuple[list[int], list[int]]:
        """The ranks of a row that can take part, those that do most first, and what the first 0, 1, 2, ... of them do
        together."""
        key = (row, times)
        if key not in self._orders:
            able = [
                (-most, kind) for kind in self._rows[row].kinds if (most := self._most_of(kind[0], times)) is not None
            ]
            able.sort()
            ranks = [rank for _, kind in able for rank in kind]
            sums = accumulate((-most for most, kind in able for _ in repeat(None, len(kind))), initial=0)
            self._orders[key] = (ranks, list(sums))
        return self._orders[key]

    def _most_of(self, rank: int, times: tuple[int, int, int]) -> int | None:
        load = self._load(rank)
        key = (id(load), times)
        if key not in self._most:
            self._worked_out += 1
            until_s, first_s, last_s = (number * self._grid_s for number in times)
            lines = (Line(self._hidden(rank), first_s), Line(0.0, last_s))
            if load.limit == 0 or load.end_s(0, lines) > until_s:
                self._most[key] = None
            else:
                self._most[key] = load.most(until_s, lines, guess=self._guess, total=self._total)
        return self._most[key]


def rows_of(problem: Problem, ranks: Sequence[int], *, by_noise: bool) -> list[Row]:
    """Return `ranks` cut into rows; `by_noise`, so that all devices of a row vary alike."""
    alike = problem.alike
    rows = []
    for host, group in groupby(ranks, lambda rank: problem.ranks[rank].host):
        row: dict[float, dict[int, list[int]]] = {}
        for rank in group:
            kinds = row.setdefault(alike[rank].jitter if by_noise else 0.0, {})
            kinds.setdefault(id(alike[rank]), []).append(rank)
        for kinds in row.values():
            members = tuple(sorted(rank for kind in kinds.values() for rank in kind))
            rows.append(Row(host, members, tuple(map(tuple, kinds.values()))))
    return rows
