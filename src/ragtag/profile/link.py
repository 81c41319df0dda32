"""Latency and bandwidth of the path between two hosts, or between two devices of one host.

The one idea: the time of a message of n bytes is latency + n / bandwidth, so messages grow until the second part
outweighs the first, and the difference to an empty message gives the bandwidth.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

from ragtag.core.profile import LinkProfile
from ragtag.profile.statistics import half_spread

RoundTrip = Callable[[int, bool], float]
"""Sends so many bytes and an empty answer, the bytes on the way there (or, with True, on the way back); seconds."""

_LEAST_BYTES = 16 << 10
_MOST_BYTES = 32 << 20
_PINGS = 15
_REPETITIONS = 4
"""Of the largest message, in each direction."""


def pairs_to_measure(hosts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return one pair of ranks for every pair of hosts, and for every host with several ranks; hosts are by rank."""
    first: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    inside: set[str] = set()
    for rank, host in enumerate(hosts):
        if host not in first:
            pairs += [(other, rank) for other in first.values()]
            first[host] = rank
        elif host not in inside:
            inside.add(host)
            pairs.append((first[host], rank))
    return tuple(pairs)


def measure_link(
    round_trip: RoundTrip,
    *,
    between: tuple[str, str],
    budget_s: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkProfile:
    """Measure one path; both directions are taken in turn and counted together.

    Args:
        round_trip: does one.
        between: the hosts, for the profile.
        budget_s: how long it should take, in seconds; what is needed at least is done on a slower link too.
        clock: wall clock, in seconds.
    """
    started_s = clock()
    round_trip(0, False)
    pings = [round_trip(0, False)]
    while len(pings) < _PINGS and clock() - started_s < budget_s / 4:
        pings.append(round_trip(0, False))
    empty_s = median(pings)
    size, taken_s = _LEAST_BYTES, round_trip(_LEAST_BYTES, False)
    while size < _MOST_BYTES and taken_s - empty_s < max(0.05, 4 * empty_s):
        left_s = budget_s - (clock() - started_s)
        if 2 * _REPETITIONS * 4 * taken_s > left_s:
            break
        size *= 4
        taken_s = round_trip(size, False)
    bandwidths = []
    for repetition in range(2 * _REPETITIONS):
        taken_s = round_trip(size, repetition % 2 == 1)
        # A message cannot be quicker than an empty one; where it seems so the clock's grain decides.
        bandwidths.append(size / max(taken_s - empty_s, 1e-6))
        if repetition >= 1 and clock() - started_s > 2 * budget_s:
            break
    bandwidth = median(bandwidths)
    return LinkProfile(
        between=between,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=empty_s / 2,
        spread=half_spread(bandwidths) / bandwidth,
        latency_spread_s=half_spread(pings) / 2,
    )
