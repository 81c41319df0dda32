"""Which devices take part: a slow link or a slow optimizer can cost everybody more than a device's share saves.

The one idea: equal devices on one host are interchangeable, so subsets are counts by kind. Few kinds are tried out
completely; many are improved step by step, whole hosts first, with a bounded number of trials.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod

from ragtag.cost.device import constant_s
from ragtag.cost.problem import Problem, solo_samples_per_s

_ALL_SUBSETS = 300
"""Up to so many subsets all of them are tried."""
_SLOWEST_TRIAL = 80
"""What a trial costs a kind of device beside a device, about: bounds the trials so that 4,096 devices take seconds."""

Subset = tuple[int, ...]
"""Ranks that take part, ascending."""
StepTime = Callable[[Subset], float | None]
"""Seconds of a step on a subset; None: it cannot run there."""


def best_subset(problem: Problem, step_s: StepTime, ranks: Sequence[int] | None = None) -> Subset | None:
    """Return the subset of `ranks` (None: all) with the shortest step, of equals one with more devices; None: none.

    Optimal for few kinds of devices; otherwise no single kind or host that it leaves out or takes in would help, as far
    as the trials reach.
    """
    everybody = tuple(range(len(problem.ranks)) if ranks is None else ranks)
    groups: dict[tuple[int, str], list[int]] = {}
    for rank in everybody:
        groups.setdefault((id(problem.alike[rank]), problem.ranks[rank].host), []).append(rank)
    members = list(groups.values())
    known: dict[Subset, float | None] = {}

    def time(subset: Subset) -> float | None:
        if subset not in known:
            known[subset] = step_s(subset) if subset else None
        return known[subset]

    if prod(len(member) + 1 for member in members) <= _ALL_SUBSETS:
        for counts in product(*(range(len(member), -1, -1) for member in members)):
            time(tuple(sorted(rank for member, count in zip(members, counts) for rank in member[:count])))
    else:
        _improve(problem, everybody, members, time, known, _trials(problem, everybody) * len(everybody))
    found = [(seconds, -len(subset), subset) for subset, seconds in known.items() if seconds is not None]
    return min(found)[2] if found else None


def _trials(problem: Problem, everybody: Subset) -> int:
    """Return how many trials with all ranks the search may cost."""
    kinds = len({id(problem.alike[rank]) for rank in everybody})
    if len(everybody) <= 200:
        return max(20, min(4000 // kinds, 200))
    return max(5, min(500 * len(everybody) // (4 * len(everybody) + _SLOWEST_TRIAL * kinds), 100))


def _improve(
    problem: Problem,
    everybody: Subset,
    members: Sequence[list[int]],
    time: StepTime,
    known: dict[Subset, float | None],
    budget: int,
) -> None:
    """Fill `known`, until nothing helps or the subsets tried have `budget` ranks together."""
    spent = len(everybody)
    time(everybody)
    for start in (*_short_constants(problem, members), *_fast_hosts(problem, everybody, members, time)):
        spent += len(start) if start not in known else 0
        time(start)
    while True:
        finite = [(seconds, -len(subset), subset) for subset, seconds in known.items() if seconds is not None]
        best_s, _, best = min(finite) if finite else (float("inf"), 0, everybody)
        for neighbour in _neighbours(problem, best, members):
            if not neighbour or neighbour in known:
                continue
            spent += len(neighbour)
            if spent > budget:
                return
            seconds = time(neighbour)
            if seconds is not None and seconds < best_s * (1 - 1e-9):
                break
        else:
            return


def _short_constants(problem: Problem, members: Sequence[list[int]]) -> Iterator[Subset]:
    """Those whose constant time is at most some value, on all hosts and on each.

    Two devices with a long optimizer hide each other: without only one of them nothing is gained.
    """
    if len(members) > 40:
        return
    hosts = {problem.ranks[member[0]].host for member in members}
    for most_s in sorted({constant_s(problem.alike[member[0]]) for member in members}):
        within = [member for member in members if constant_s(problem.alike[member[0]]) <= most_s]
        yield tuple(sorted(rank for member in within for rank in member))
        for host in sorted(hosts) if 1 < len(hosts) <= 4 else ():
            yield tuple(sorted(rank for member in within for rank in member if problem.ranks[rank].host == host))


def _fast_hosts(problem: Problem, everybody: Subset, members: Sequence[list[int]], time: StepTime) -> Iterator[Subset]:
    """The fastest host, the fastest two, four, ...; then numbers of hosts around the best of these."""
    speeds: dict[str, float] = {}
    for member in members:
        host = problem.ranks[member[0]].host
        speeds[host] = speeds.get(host, 0.0) + _speed(problem, member) * len(member)
    hosts = sorted(speeds, key=lambda host: (-speeds[host], host))

    def first(number: int) -> Subset:
        chosen = set(hosts[:number])
        return tuple(rank for rank in everybody if problem.ranks[rank].host in chosen)

    numbers = [1 << power for power in range(len(hosts).bit_length()) if 1 << power < len(hosts)] + [len(hosts)]
    for number in numbers:
        yield first(number)
    times = {number: seconds for number in numbers if (seconds := time(first(number))) is not None}
    if not times:
        return
    best = min(times, key=lambda number: (times[number], -number))
    stride = best // 4
    while stride:
        for number in (best - stride, best + stride):
            if 1 <= number <= len(hosts):
                yield first(number)
                seconds = time(first(number))
                if seconds is not None and seconds < times[best]:
                    best, times = number, times | {number: seconds}
                    break
        else:
            stride //= 2


def _speed(problem: Problem, member: Sequence[int]) -> float:
    return solo_samples_per_s(problem.alike[member[0]], problem.global_batch_size, problem.model.unit)


def _neighbours(problem: Problem, subset: Subset, members: Sequence[list[int]]) -> Iterator[Subset]:
    """Without one host, without one kind, with one kind more, with one device more or less; slow kinds go first."""
    inside = set(subset)

    ordered = sorted(members, key=lambda member: (_speed(problem, member), member[0]))
    hosts = list(dict.fromkeys(problem.ranks[member[0]].host for member in ordered))
    if len(hosts) > 1:
        for host in hosts:
            yield tuple(rank for rank in subset if problem.ranks[rank].host != host)
    for member in ordered:
        yield tuple(rank for rank in subset if rank not in set(member))
    for member in reversed(ordered):
        yield tuple(sorted(inside | set(member)))
    for member in ordered:
        present = [rank for rank in member if rank in inside]
        if len(member) > 1 and present:
            yield tuple(rank for rank in subset if rank != present[-1])
        if len(member) > 1 and len(present) < len(member):
            yield tuple(sorted(inside | {next(rank for rank in member if rank not in inside)}))
