"""How long ranks need to exchange bytes over links of different speed.

The one idea: a ring moves the same bytes over every hop, so its slowest hop sets the bandwidth part, and hops that
share a link in one direction share its bandwidth; a piece of data visits one hop after the other, so latencies add up.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from ragtag.core.profile import LinkProfile

LinkBetween = Callable[[str, str], LinkProfile | None]
"""What lies between two hosts (or one host's devices, named twice); None: not known."""

LOOPBACK = LinkProfile(between=("", ""), bandwidth_bytes_per_s=4e9, latency_s=50e-6)
"""Where nothing is known: processes beside each other that copy through host memory."""


def ring_all_reduce_s(
    num_bytes: float, hosts: Sequence[str], link: LinkBetween, *, loopback: LinkProfile = LOOPBACK
) -> float:
    """Return the seconds of a ring all-reduce of `num_bytes` over ranks on `hosts`, in rank order.

    2 (n - 1) / n * bytes over the slowest hop, and the latencies of the 2 (n - 1) hops that a chunk takes (Patarasuk
    and Yuan, "Bandwidth optimal all-reduce algorithms", 2009). With equal links: 2 (n - 1) * latency.
    """
    return _ring_s(2, num_bytes, hosts, link, loopback)


def reduce_scatter_s(
    num_bytes: float, hosts: Sequence[str], link: LinkBetween, *, loopback: LinkProfile = LOOPBACK
) -> float:
    """Return the seconds of a ring reduce-scatter, or of an all-gather: half an all-reduce.

    `num_bytes` is the whole tensor. Slices may be unequal: a hop then carries everything but one slice, and the
    difference is at most one slice of the mean size (n - 1 of n slices pass every hop).
    """
    return _ring_s(1, num_bytes, hosts, link, loopback)


all_gather_s = reduce_scatter_s


def zero_s(
    stage: int,
    parameter_bytes: float,
    gradient_bytes: float,
    hosts: Sequence[str],
    link: LinkBetween,
    *,
    micro_batches: int = 1,
    loopback: LinkProfile = LOOPBACK,
) -> float:
    """Return the seconds of a step's communication under ZeRO (Rajbhandari et al., 2020, section 7).

    Stages 1 and 2 reduce-scatter gradients and all-gather parameters once a step. Stage 3 gathers parameters for
    forward and again for backward, and reduce-scatters gradients, in each of `micro_batches`. Stage 2 keeps no whole
    gradient between micro-batches and reduces in each of them.
    """
    assert stage in (1, 2, 3), f"ZeRO stage {stage}"
    reduce_s = reduce_scatter_s(gradient_bytes, hosts, link, loopback=loopback)
    gather_s = all_gather_s(parameter_bytes, hosts, link, loopback=loopback)
    if stage == 1:
        return reduce_s + gather_s
    if stage == 2:
        return micro_batches * reduce_s + gather_s
    return micro_batches * (2 * gather_s + reduce_s)


def send_s(num_bytes: float, host: str, other: str, link: LinkBetween, *, loopback: LinkProfile = LOOPBACK) -> float:
    """Return the seconds of one message."""
    between = link(host, other) or loopback
    return between.latency_s + num_bytes / between.bandwidth_bytes_per_s


def vote_s(hosts: Sequence[str], link: LinkBetween, *, loopback: LinkProfile = LOOPBACK) -> float:
    """Return the seconds until every rank has every other's ballot: the largest latency between any two hosts."""
    if len(hosts) < 2:
        return 0.0
    counts = Counter(hosts)
    names = sorted(counts)
    latest = max(
        ((link(host, other) or loopback).latency_s for index, host in enumerate(names) for other in names[index + 1 :]),
        default=0.0,
    )
    beside = ((link(host, host) or loopback).latency_s for host, count in counts.items() if count > 1)
    return max([latest, *beside])


def _ring_s(passes: int, num_bytes: float, hosts: Sequence[str], link: LinkBetween, loopback: LinkProfile) -> float:
    num_ranks = len(hosts)
    if num_ranks < 2 or num_bytes <= 0:
        return 0.0
    hops = [*pairwise(hosts), (hosts[-1], hosts[0])]
    links = {hop: link(*hop) or loopback for hop in set(hops)}
    transfer_s = max(count / links[hop].bandwidth_bytes_per_s for hop, count in Counter(hops).items())
    latencies = [links[hop].latency_s for hop in hops]
    # Of passes * n hops around the ring a chunk skips `passes` consecutive ones; the longest path skips the quickest.
    if passes == 1:
        skipped_s = min(latencies)
    else:
        skipped_s = min(first + second for first, second in zip(latencies, [*latencies[1:], latencies[0]]))
    return passes * (num_ranks - 1) / num_ranks * num_bytes * transfer_s + passes * sum(latencies) - skipped_s
