"""What reducing gradients costs over ranks on any hosts, worked out once for each.

The one idea: a search asks about the same hosts again and again, with other devices on them, and only the hosts matter.
"""

from collections import Counter
from functools import cached_property
from itertools import combinations_with_replacement

from ragtag.core.profile import DeviceProfile
from ragtag.cost.comm import LOOPBACK, vote_s
from ragtag.cost.problem import Problem
from ragtag.cost.reduction import Line, bucket_rings_s, lines
from ragtag.plan.load import NOTHING_TO_REDUCE

_FEW_HOSTS = 40
"""Up to so many, looking at every pair of them is quicker than looking for the slowest pair of all hosts."""

Hosts = tuple[str, ...]
"""Of the ranks that reduce together, in rank order."""


class Rings:
    """Answers for one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._rings_s: dict[Hosts, tuple[float, ...]] = {}
        self._votes_s: dict[tuple[frozenset[str], frozenset[str]], float] = {}
        self._lines: dict[tuple[Hosts, tuple[float, ...]], tuple[Line, ...]] = {}

    def rings_s(self, hosts: Hosts) -> tuple[float, ...]:
        """Return the seconds of each bucket's ring."""
        if hosts not in self._rings_s:
            self._rings_s[hosts] = bucket_rings_s(self._problem, hosts) if len(hosts) > 1 else (0.0,)
        return self._rings_s[hosts]

    def vote_s(self, hosts: Hosts) -> float:
        """Return the seconds of the vote, as `cost.comm.vote_s` does."""
        counts = Counter(hosts)
        key = (frozenset(counts), frozenset([host for host, count in counts.items() if count > 1]))
        if key not in self._votes_s:
            few = len(counts) <= _FEW_HOSTS
            self._votes_s[key] = vote_s(hosts, self._problem.link) if few else self._largest_latency_s(*key)
        return self._votes_s[key]

    def _largest_latency_s(self, present: frozenset[str], several: frozenset[str]) -> float:
        """Of pairs of hosts that are `present`, and within those that have `several` ranks."""
        for latency_s, host, other in self._slowest_first:
            if host in present and other in present and (host != other or host in several):
                return latency_s
        return 0.0

    @cached_property
    def _slowest_first(self) -> list[tuple[float, str, str]]:
        hosts = sorted({rank.host for rank in self._problem.ranks})
        link = self._problem.link
        pairs = combinations_with_replacement(hosts, 2)
        found = [((link(host, other) or LOOPBACK).latency_s, host, other) for host, other in pairs]
        return sorted(found, key=lambda pair: -pair[0])

    def lines(self, hosts: Hosts, device: DeviceProfile) -> tuple[Line, ...]:
        """Return what reducing adds after the work of `device`."""
        if len(hosts) < 2:
            return NOTHING_TO_REDUCE
        key = (hosts, device.bucket_ready)
        if key not in self._lines:
            self._lines[key] = lines(self._problem, device, self.rings_s(hosts))
        return self._lines[key]
