"""Where the search for who takes part begins: subsets that are often good.

The one idea: what makes a device not worth having is a long optimizer, a slow link or too little speed, so devices are
sorted by each of these and left out from the worst end.
"""

from collections.abc import Iterable, Iterator, Sequence

from ragtag.cost.comm import LOOPBACK
from ragtag.cost.device import constant_s
from ragtag.cost.problem import Problem, solo_samples_per_s
from ragtag.plan.room import Rows

_MOST_CONSTANTS = 40
_MOST_HOSTS_APART = 64
_MOST_LINKS = 8


def starts(problem: Problem, everybody: Sequence[int], rows: Rows) -> Iterator[tuple[int, ...]]:
    """Yield subsets of `everybody`."""
    yield from thinner(problem, everybody)
    yield from _well_connected(problem, everybody, rows)
    yield from _short_constants(problem, everybody, rows)


def thinner(problem: Problem, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield `ranks` without the slowest devices, and without the hosts that do least, in growing numbers."""
    kinds = {id(problem.alike[rank]): rank for rank in ranks}
    speed_of_kind = {kind: speed_of(problem, rank) for kind, rank in kinds.items()}
    speeds = {rank: speed_of_kind[id(problem.alike[rank])] for rank in ranks}
    for least in _steps_down(speeds.values()):
        yield tuple(rank for rank in ranks if speeds[rank] >= least)
    hosts: dict[str, float] = {}
    for rank in ranks:
        host = problem.ranks[rank].host
        hosts[host] = hosts.get(host, 0.0) + speeds[rank]
    for least in _steps_down(hosts.values()):
        yield tuple(rank for rank in ranks if hosts[problem.ranks[rank].host] >= least)


def _steps_down(speeds: Iterable[float]) -> Iterator[float]:
    """Yield speeds that fewer and fewer of `speeds` reach: in steps of a tenth of them, or of all that are equal."""
    ordered = sorted(speeds, reverse=True)
    number = len(ordered)
    while number > 1:
        number = min(number - 1, number * 9 // 10)
        least = ordered[number - 1]
        if least == ordered[number]:
            # Equal ones go together.
            number = next((index for index, speed in enumerate(ordered) if speed == least), 0)
            least = ordered[number - 1]
        if number:
            yield least


def speed_of(problem: Problem, rank: int) -> float:
    """Return what a rank would do alone, in samples a second."""
    return solo_samples_per_s(problem.alike[rank], problem.global_batch_size, problem.model.unit)


def _short_constants(problem: Problem, everybody: Sequence[int], rows: Rows) -> Iterator[tuple[int, ...]]:
    """Those whose constant time is at most some value, on all hosts and on each.

    Two devices with a long optimizer hide each other: without only one of them nothing is gained.
    """
    constants_s = sorted({constant_s(problem.alike[rank]) for rank in everybody})
    if len(constants_s) > _MOST_CONSTANTS:
        return
    for most_s in constants_s:
        yield tuple(rank for rank in everybody if constant_s(problem.alike[rank]) <= most_s)
        for row in rows if 1 < len(rows) <= 16 else ():
            if inside := tuple(rank for rank in row.ranks if constant_s(problem.alike[rank]) <= most_s):
                yield inside


def _well_connected(problem: Problem, everybody: Sequence[int], rows: Rows) -> Iterator[tuple[int, ...]]:
    """Hosts that only links of at least some bandwidth join, for the slowest few bandwidths."""
    hosts = list(dict.fromkeys(row.host for row in rows))
    if not 1 < len(hosts) <= _MOST_HOSTS_APART:
        return
    bandwidth = {
        (host, other): (problem.link(host, other) or LOOPBACK).bandwidth_bytes_per_s
        for index, host in enumerate(hosts)
        for other in hosts[index + 1 :]
    }
    for least in sorted(set(bandwidth.values()))[1 : _MOST_LINKS + 1]:
        group = {host: host for host in hosts}
        for (host, other), there in bandwidth.items():
            if there >= least and group[host] != group[other]:
                kept, gone = group[host], group[other]
                group = {name: kept if owner == gone else owner for name, owner in group.items()}
        for name in dict.fromkeys(group.values()):
            yield tuple(rank for rank in everybody if group[problem.ranks[rank].host] == name)
