"""Which devices take part: a slow link or a slow optimizer can cost everybody more than a device's share saves.

The one idea: only how many devices of each host take part is searched for, and `Room` tells in microseconds that some
numbers cannot beat the best step found. Where there are few enough numbers all are looked at; otherwise good starts are
improved until nothing near them helps.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from math import inf, prod
from typing import Protocol

from ragtag.cost.problem import Problem
from ragtag.plan.room import Counts, Rows, rows_of
from ragtag.plan.starts import speed_of, starts, thinner

_ALL_COUNTS = 5000
"""Up to so many numbers of devices by host, all of them are looked at: 12 hosts of one device are 4096."""
_CLIMBS = 3
"""How many of the starts are improved."""
_SMALLER = 1 - 1e-9
"""A step must be shorter by more than rounding for devices to be left out."""
_MOST_ROWS_EXCHANGED = 24
_LARGE = 200
"""With more devices, one start is improved, and devices that neither help nor cost are not looked for."""
_COST = 250_000
_COST_OF_A_RANK = 400
"""How much the search may cost, as `Solves.cost` counts: bounded so that 4,096 devices take seconds."""

Subset = tuple[int, ...]
"""Ranks that take part, ascending."""


class Solves(Protocol):
    """What the search asks."""

    problem: Problem
    cost: int
    """What was worked out so far, in ranks."""

    def step_s(self, subset: Subset) -> float | None:
        """Seconds of a step on a subset; None: it cannot run there."""
        ...

    def fits(self, rank: int) -> bool:
        """Whether a rank can hold the model at all."""
        ...

    def better(self, rows: Rows, counts: Counts, step_s: float) -> tuple[Subset, float] | None:
        """The best subset of so many ranks of each row and its seconds, if they are less than `step_s`."""
        ...


def best_subset(solver: Solves, ranks: Sequence[int] | None = None, near: Subset | None = None) -> Subset | None:
    """Return the subset of `ranks` (None: all) with the shortest step, of equals one with more devices; None: none.

    The optimum, within half a percent, where all numbers are looked at. Otherwise no host more or less, no device more
    or less and no exchange between two hosts would help, as far as the allowed cost reaches; `near` is then the start.
    """
    problem = solver.problem
    everybody = tuple(rank for rank in (range(len(problem.ranks)) if ranks is None else ranks) if solver.fits(rank))
    if not everybody or (step_s := solver.step_s(everybody)) is None:
        return None
    rows = rows_of(problem, everybody, by_noise=True)
    if prod(len(row.ranks) + 1 for row in rows) <= _ALL_COUNTS:
        search = _Search(solver, everybody, rows, step_s)
        search.try_all(starts(problem, everybody, rows))
    else:
        search = _Search(solver, everybody, rows_of(problem, everybody, by_noise=False), step_s)
        first = (near,) if near is not None else starts(problem, everybody, search.rows)
        for subset, seconds in search.try_each(first)[: 1 if len(everybody) > _LARGE else _CLIMBS]:
            search.climb(*search.thin(subset, seconds))
        search.exchange_kinds()
    if len(everybody) <= _LARGE:
        search.fill_up()
    return search.best


class _Search:
    """The best subset so far, and what may still be tried."""

    def __init__(self, solver: Solves, everybody: Subset, rows: Rows, step_s: float) -> None:
        self._solver, self._problem, self._everybody, self.rows = solver, solver.problem, everybody, rows
        self.best, self._best_s = everybody, step_s
        self._most_cost = solver.cost + _COST + _COST_OF_A_RANK * len(everybody)

    @property
    def _goes_on(self) -> bool:
        return self._solver.cost < self._most_cost

    def _time(self, subset: Subset) -> float:
        """Seconds of a step on `subset`, which becomes the best if it is."""
        seconds = self._solver.step_s(subset) if subset else None
        if seconds is not None and seconds < self._best_s * _SMALLER:
            self.best, self._best_s = subset, seconds
        return inf if seconds is None else seconds

    def _better(self, counts: Counts, than_s: float) -> tuple[Subset, float] | None:
        found = self._solver.better(self.rows, counts, than_s * _SMALLER) if any(counts) else None
        if found is not None and found[1] < self._best_s * _SMALLER:
            self.best, self._best_s = found
        return found

    def try_each(self, subsets: Iterator[Subset] | Sequence[Subset]) -> list[tuple[Subset, float]]:
        """Return all ranks and those of `subsets` that can run with their seconds, the best first."""
        found = {self._everybody: self._best_s}
        for subset in subsets:
            if not self._goes_on:
                break
            if (seconds := self._time(subset)) < inf:
                found[subset] = seconds
        return sorted(found.items(), key=lambda item: (item[1], -len(item[0]), item[0]))

    def try_all(self, first: Iterator[Subset]) -> None:
        """Try `first`, then look at all counts, many devices first."""
        self.try_each(first)
        counts = product(*(range(len(row.ranks) + 1) for row in self.rows))
        for each in sorted(counts, key=lambda each: (-sum(each), each)):
            self._better(each, self._best_s)

    def thin(self, subset: Subset, now_s: float) -> tuple[Subset, float]:
        """Leave out slow devices and small hosts in large numbers, as long as that helps."""
        improved = True
        while improved and self._goes_on:
            improved = False
            for fewer in thinner(self._problem, subset):
                seconds = self._time(fewer)
                if seconds < now_s * _SMALLER:
                    subset, now_s, improved = fewer, seconds, True
                    break
        return subset, now_s

    def climb(self, subset: Subset, now_s: float) -> None:
        """Go on to better neighbours until there is none."""
        inside = set(subset)
        counts = [sum(rank in inside for rank in row.ranks) for row in self.rows]
        found = self._better(tuple(counts), now_s)
        now_s = now_s if found is None else found[1]
        improved = True
        while improved and self._goes_on:
            improved = False
            for near in self._neighbours(counts):
                if not self._goes_on:
                    return
                found = self._better(near, now_s)
                if found is not None:
                    # The neighbours that follow are those of the new counts.
                    counts[:], now_s, improved = near, found[1], True

    def _neighbours(self, counts: Sequence[int]) -> Iterator[Counts]:
        """One row without any, with all, with its fastest kinds, with one less or more; then one less here and one more
        there. Follows `counts` as they change."""
        for row, kinds in self._kinds:
            for count in (0, len(self.rows[row].ranks), *kinds):
                if count != counts[row]:
                    yield _with(counts, {row: count})
            for count in (counts[row] - 1, counts[row] + 1):
                if 0 < count < len(self.rows[row].ranks):
                    yield _with(counts, {row: count})
        if len(counts) > _MOST_ROWS_EXCHANGED:
            return
        for (row, _), (other, _) in product(self._kinds, reversed(self._kinds)):
            if row != other and counts[row] and counts[other] < len(self.rows[other].ranks):
                yield _with(counts, {row: counts[row] - 1, other: counts[other] + 1})

    @cached_property
    def _kinds(self) -> list[tuple[int, list[int]]]:
        """Rows, those with slow devices first, and how many devices the one, two, ... fastest kinds in it are."""
        found = []
        for index, row in enumerate(self.rows):
            kinds = sorted(((speed_of(self._problem, kind[0]), len(kind)) for kind in row.kinds), reverse=True)
            counts = [*accumulate(count for _, count in kinds)]
            found.append((sum(speed * count for speed, count in kinds) / len(row.ranks), index, counts[:-1]))
        return [(row, counts) for _, row, counts in sorted(found)]

    def exchange_kinds(self) -> None:
        """Where devices vary differently, also leave out, take in or exchange single ones: counts know only means."""
        alike = self._problem.alike
        improved = len({alike[rank].jitter for rank in self._everybody}) > 1
        while improved:
            improved = False
            inside = set(self.best)
            leave = _one_of_each_kind(self._problem, [rank for rank in self._everybody if rank in inside])
            enter = _one_of_each_kind(self._problem, [rank for rank in self._everybody if rank not in inside])
            for gone, new in product([None, *leave], [None, *enter]):
                if not self._goes_on:
                    return
                before_s = self._best_s
                self._time(tuple(sorted((inside - {gone}) | ({new} if new is not None else set()))))
                if self._best_s < before_s:
                    improved = True
                    break

    def fill_up(self) -> None:
        """Take in devices that cost nothing."""
        inside = set(self.best)
        for new in _one_of_each_kind(self._problem, [rank for rank in self._everybody if rank not in inside]):
            if not self._goes_on:
                return
            subset = tuple(sorted((*self.best, new)))
            if self._time(subset) <= self._best_s / _SMALLER:
                self.best = subset


def _with(counts: Sequence[int], changed: dict[int, int]) -> Counts:
    return tuple(changed.get(row, count) for row, count in enumerate(counts))


def _one_of_each_kind(problem: Problem, ranks: Sequence[int]) -> list[int]:
    kinds: dict[tuple[int, str], int] = {}
    for rank in ranks:
        kinds.setdefault((id(problem.alike[rank]), problem.ranks[rank].host), rank)
    return list(kinds.values())
