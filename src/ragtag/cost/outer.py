"""What an outer loop between islands costs: seconds of an exchange, and progress per sample.

The one idea: an exchange hides behind enough inner steps, so it costs no time but progress, which falls with their
number and with that of islands; both are put together as time to the same loss.
"""

from collections.abc import Sequence
from math import exp

from ragtag.core.inner_steps import HIDDEN
from ragtag.core.profile import LinkProfile
from ragtag.cost.comm import LOOPBACK, LinkBetween

INT4_PART = (128 + 4) / 1024
"""Bytes of a block of 256 numbers with its scale, over those of fp32."""
NUM_FRAGMENTS = 4
"""As `Config.fragments`."""
USUAL_LOSS_FALL = 0.042
"""S / L of our own runs of 0.234 M parameters, where none is given; 0.05 to 0.1 in fits of larger models."""
_TOY_RISE = 0.0036
_RISE_AT_35M, _FALLS = 0.007, 0.35
_ASYNCHRONOUS = 0.82
"""0.74 against 0.90 on two sites (docs/benchmarks.md)."""


def exchange_s(
    num_bytes: float, islands: Sequence[str], link: LinkBetween, *, loopback: LinkProfile = LOOPBACK
) -> float:
    """Return the seconds in which `num_bytes` of each island go to the hub and come back merged.

    Args:
        islands: one host of each; the hub is at the first one.

    The island with the slowest way is waited for; fragments go one after the other, each there and then back.
    """
    if len(islands) < 2:
        return 0.0
    ways = [link(islands[0], other) or loopback for other in islands[1:]]
    return max(2 * (num_bytes / way.bandwidth_bytes_per_s + NUM_FRAGMENTS * way.latency_s) for way in ways)


def exposed_s(exchange: float, inner_steps: int, inner_s: float) -> float:
    """Return what an exchange of `exchange` seconds adds to each inner step: nothing while 0.8 of them hide it."""
    return max(exchange - HIDDEN * inner_steps * inner_s, 0.0) / inner_steps


def progress(
    num_parameters: float, num_islands: int, inner_steps: int, loss_fall: float, *, asynchronous: bool = False
) -> float:
    """Return what a sample is worth against exact synchronisation: exp(-dL / S).

    dL / L = k (M - 1) (H / 25)^0.4 + 1e-4 (M - 1) tau, tau = H / 5: a fit to our own runs of 0.234 M parameters, where
    k = 0.0036. Larger models lose less: k = 0.007 (n / 35 M)^-0.35 fits published runs of four islands and more
    (Charles et al., "Communication-efficient language model training scales reliably and robustly", 2025, arXiv
    2503.09799); the smaller of both is taken. Merging what comes when it comes: 0.82 of that.

    Args:
        num_islands: M.
        inner_steps: H.
        loss_fall: S / L = -dL / dln(samples) / L.
    """
    others = num_islands - 1
    rise = min(_TOY_RISE, _RISE_AT_35M * (max(num_parameters, 1.0) / 35e6) ** -_FALLS)
    lost = rise * others * (inner_steps / 25) ** 0.4 + 1e-4 * others * inner_steps / 5
    return exp(-lost / loss_fall) * (_ASYNCHRONOUS if asynchronous else 1.0)
