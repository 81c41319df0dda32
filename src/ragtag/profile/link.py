"""Latency and bandwidth of the path between two hosts, or between two devices of one host.

The one idea: bytes travel both ways at once, as in a ring, and what a large message takes longer than one of a quarter
gives the bandwidth: what comes once, such as TCP's start or the burst that a shaped link lets pass, is in both.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

from ragtag.core.profile import LinkProfile
from ragtag.profile.statistics import half_spread

RoundTrip = Callable[[int], float]
"""Sends so many bytes, has as many sent back at the same time, and returns the seconds until both ends have theirs."""

_LEAST_BYTES = 16 << 10
_MOST_BYTES = 32 << 20
_PINGS = 15
_REPETITIONS = 6
"""Of the largest message, and of one of a quarter of it."""


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
    """Measure one path, used in both directions at once; a link that these share gives each a part.

    Args:
        round_trip: does one.
        between: the hosts, for the profile.
        budget_s: how long it should take, in seconds; what is needed at least is done on a slower link too.
        clock: wall clock, in seconds.
    """
    started_s = clock()
    round_trip(0)
    pings = [round_trip(0)]
    while len(pings) < _PINGS and clock() - started_s < budget_s / 4:
        pings.append(round_trip(0))
    empty_s = median(pings)
    size, taken_s = _LEAST_BYTES, round_trip(_LEAST_BYTES)
    while size < _MOST_BYTES and taken_s - empty_s < max(0.05, 4 * empty_s):
        left_s = budget_s - (clock() - started_s)
        if _REPETITIONS * (4 + 1) * taken_s > left_s:
            break
        size *= 4
        taken_s = round_trip(size)
    larges, smalls = [], []
    for repetition in range(_REPETITIONS):
        smalls.append(round_trip(size // 4))
        larges.append(round_trip(size))
        if repetition >= 1 and clock() - started_s > 2 * budget_s:
            break
    longer_s = median(larges) - median(smalls)
    # A large message cannot be as quick as a small one; where it seems so the clock's grain decides.
    bandwidth = (size - size // 4) / max(longer_s, 1e-6)
    bandwidths = [(size - size // 4) / max(large - small, 1e-6) for large, small in zip(larges, smalls)]
    return LinkProfile(
        between=between,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=empty_s / 2,
        spread=half_spread(bandwidths) / bandwidth,
        latency_spread_s=half_spread(pings) / 2,
    )
