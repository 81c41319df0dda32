"""Islands: exact synchronisation within groups of hosts that are well connected, a streamed outer loop between them.

The one idea: cut the cluster at its slowest links. Inside, shares are found as ever; an outer exchange every H steps
hides behind computing, and costs progress per sample instead of time (DESIGN.md, section 8).
"""

from itertools import combinations
from math import ceil

import msgspec

from ragtag.cost.candidate import Candidate
from ragtag.cost.comm import LOOPBACK, outer_loop_s
from ragtag.cost.problem import Problem
from ragtag.cost.step import predict_on
from ragtag.plan.replicated import Solver, Way

_FEWEST_INNER_STEPS = 10
_CUTS_TRIED = 3
_MOST_ISLANDS = 8
"""Progress per sample falls with every island; more than these have never paid (ALGORITHMS.md)."""


def islands(problem: Problem) -> Candidate | None:
    """Return the best candidate with islands; None: there is no slower link to cut at."""
    best: tuple[float, Candidate] | None = None
    for owner in _partitions(problem):
        solver = Solver(
            problem, Way(name="islands", own_size=True, not_yet="an outer loop between islands"), islands=owner
        )
        candidate = solver.candidate(tuple(range(len(problem.ranks))))
        if candidate is None:
            continue
        candidate = _with_inner_steps(problem, candidate)
        rate = predict_on(problem, candidate).effective_samples_per_s
        if best is None or rate > best[0]:
            best = (rate, candidate)
    return None if best is None else best[1]


def _with_inner_steps(problem: Problem, candidate: Candidate) -> Candidate:
    """H = max(10, outer exchange / (0.8 inner step)): the fewest steps that hide the exchange."""
    hosts: dict[int, str] = {}
    for part in candidate.parts:
        hosts.setdefault(part.island, problem.by_name[part.device].host)
    exchange_s = outer_loop_s(problem.model.parameter_bytes / 8, list(hosts.values()), problem.link)
    free = msgspec.structs.replace(candidate, inner_steps=1 << 40)
    inner_s = predict_on(problem, free).step_s
    steps = max(_FEWEST_INNER_STEPS, ceil(exchange_s / (0.8 * inner_s)))
    return msgspec.structs.replace(
        candidate, name=f"{len(hosts)} islands, exchange every {steps} steps", inner_steps=steps
    )


def _partitions(problem: Problem) -> list[tuple[int, ...]]:
    """Return each rank's island for the slowest few bandwidths to cut at; only partitions of two islands or more."""
    hosts = list(dict.fromkeys(rank.host for rank in problem.ranks))
    bandwidths = {pair: (problem.link(*pair) or LOOPBACK).bandwidth_bytes_per_s for pair in combinations(hosts, 2)}
    found: list[tuple[int, ...]] = []
    for limit in sorted(set(bandwidths.values()))[:_CUTS_TRIED]:
        root = {host: host for host in hosts}
        for (host, other), bandwidth in bandwidths.items():
            if bandwidth > limit:
                first, second = _root(root, host), _root(root, other)
                root[second] = first
        names = list(dict.fromkeys(_root(root, host) for host in hosts))
        owner = tuple(names.index(_root(root, rank.host)) for rank in problem.ranks)
        if 1 < len(names) <= _MOST_ISLANDS and owner not in found:
            found.append(owner)
    return found


def _root(root: dict[str, str], host: str) -> str:
    while root[host] != host:
        root[host] = root[root[host]]
        host = root[host]
    return host
