"""What each device adds to a run, or costs it, at the speeds that are known now.

The one idea: the controller's own model plans the run once more without the device. What it would be worth is not
guessed from its share, since the others would take over its work, and the ring would be one hop shorter.
"""

from collections.abc import Sequence

import msgspec

from ragtag.control.predict import Cluster, predict_step_s
from ragtag.control.proposal import Limits, best_plan
from ragtag.control.speed import Speed
from ragtag.core.errors import SettingError
from ragtag.core.values import Plan

_NOTHING = 0.005


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Of one device."""

    gain: float
    """Steps a second with it over those without it, less 1."""
    text: str
    """"adds 9 %"."""


def gains(cluster: Cluster, plan: Plan, limits: Limits) -> tuple[Gain, ...]:
    """Return what each rank adds under the best shares for it and under the best without it; empty: not known yet.

    Communication without a rank is scaled to a ring of one rank less: its time goes with (n - 1) / n.
    """
    working = [speed for speed, share in zip(cluster.speeds, plan.shares) if share]
    if len(plan.shares) < 2 or not all(speed.known for speed in working):
        return ()
    with_s = predict_step_s(cluster, plan)
    return tuple(_gain(cluster, plan, limits, rank, with_s) for rank in range(len(plan.shares)))


def _gain(cluster: Cluster, plan: Plan, limits: Limits, rank: int, with_s: float) -> Gain:
    if not plan.shares[rank]:
        return Gain(gain=0.0, text="has no work")
    others = [share for other, share in enumerate(plan.shares) if share and other != rank]
    if not others:
        return Gain(gain=0.0, text="does all the work")
    left = without(cluster, rank)
    caps = limits.caps or (None,) * len(plan.shares)
    try:
        best = best_plan(left, plan, msgspec.structs.replace(limits, caps=_none_for(rank, caps)))
    except SettingError:
        return Gain(gain=0.0, text="is needed: the others have no room for its share")
    num_ranks = len(others) + 1
    rest_s = cluster.rest_s()
    fewer_hops = num_ranks * (num_ranks - 2) / (num_ranks - 1) ** 2
    without_s = predict_step_s(left, best) - (1 - fewer_hops) * rest_s
    gain = without_s / with_s - 1
    return Gain(gain=gain, text=in_words(gain))


def in_words(gain: float) -> str:
    """Return "adds 9 %", "costs 4 %" or, where it is less than half a percent, "adds nothing"."""
    if abs(gain) < _NOTHING:
        return "adds nothing"
    return f"{'adds' if gain > 0 else 'costs'} {100 * abs(gain):.0f} %"


def without(cluster: Cluster, rank: int) -> Cluster:
    """The cluster as if nothing were known of `rank`, which therefore gets no work."""
    speeds = tuple(Speed() if other == rank else speed for other, speed in enumerate(cluster.speeds))
    return msgspec.structs.replace(
        cluster, speeds=speeds, apply_s=tuple(0.0 if other == rank else s for other, s in enumerate(cluster.apply_s))
    )


def _none_for(rank: int, caps: Sequence[int | None]) -> tuple[int | None, ...]:
    return tuple(0 if other == rank else cap for other, cap in enumerate(caps))
