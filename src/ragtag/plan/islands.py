"""Islands: exact synchronisation within groups of hosts that are well connected, a streamed outer loop between them.

The one idea: cut the cluster at its slowest links. Inside, shares are found as ever; an outer exchange every H steps
hides behind computing, and costs progress per sample instead of time (DESIGN.md, section 8).
"""

from collections.abc import Iterator
from itertools import combinations

import msgspec

from ragtag.core.inner_steps import inner_steps_for
from ragtag.cost.candidate import Candidate
from ragtag.cost.comm import LOOPBACK
from ragtag.cost.outer import INT4_PART, exchange_s
from ragtag.cost.problem import Problem
from ragtag.cost.step import island_hosts, predict_on
from ragtag.plan.replicated import Solver, Way

_CUTS_TRIED = 3
_MOST_ISLANDS = 8
"""Progress per sample falls with every island; more than these have never paid (ALGORITHMS.md)."""


def islands(problem: Problem) -> tuple[Candidate, ...]:
    """Return the best way to train as islands, and the same one asynchronously; empty: there is no slower link to cut
    at. With three islands or more, leaving one out is tried as well."""
    best: tuple[float, Candidate] | None = None
    for owner in _partitions(problem):
        solver = Solver(problem, Way(name="islands", own_size=True), islands=owner)
        for subset in _with_and_without(owner):
            candidate = solver.candidate(subset)
            if candidate is None or len({part.island for part in candidate.parts if part.samples}) < 2:
                continue
            candidate = _with_inner_steps(problem, candidate)
            rate = predict_on(problem, candidate).effective_samples_per_s
            if best is None or rate > best[0]:
                best = (rate, candidate)
    if best is None:
        return ()
    asynchronous = msgspec.structs.replace(best[1], name=f"{best[1].name}, asynchronous", asynchronous=True)
    return best[1], asynchronous


def _with_and_without(owner: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All ranks; then, where two islands remain, those without each island."""
    yield tuple(range(len(owner)))
    if len(set(owner)) > 2:
        for left_out in sorted(set(owner)):
            yield tuple(rank for rank, island in enumerate(owner) if island != left_out)


def _with_inner_steps(problem: Problem, candidate: Candidate) -> Candidate:
    """The fewest steps that hide the exchange."""
    hosts = island_hosts(candidate, [problem.by_name[part.device] for part in candidate.parts])
    plain_s = exchange_s(problem.model.parameter_bytes, hosts, problem.link)
    packed_s = exchange_s(problem.model.parameter_bytes * INT4_PART, hosts, problem.link)
    free = msgspec.structs.replace(candidate, inner_steps=1 << 40)
    inner_s = predict_on(problem, free).step_s
    steps = inner_steps_for(packed_s, inner_s)
    candidate = msgspec.structs.replace(
        candidate, name=f"{len(hosts)} islands, exchange every {steps} steps", inner_steps=steps
    )
    counts = predict_on(problem, candidate).sample_efficiency
    note = (
        f"{', '.join(hosts)} exchange in {packed_s:.3g} s in int4, behind {steps} steps of {inner_s:.3g} s (in fp32: "
        f"{plain_s:.3g} s, {inner_steps_for(plain_s, inner_s)} steps); a sample counts {counts:.2f} of an exact one"
    )
    return msgspec.structs.replace(candidate, note=note)


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
