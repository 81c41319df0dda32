"""When the merge of a fragment is closed: pure decisions over who is there and who has contributed.

The one idea: nobody is waited for beyond a quorum and a grace. An island that has done its last step is not waited for
either; that all end with the same values is for them to wait for. Quorum and grace are as in Decoupled DiLoCo (arXiv
2604.21428); the grace of 0.2 H is our own, held by simulation (tests/outer_service/test_simulated.py).
"""

import math
from collections.abc import Collection, Mapping

import msgspec

GRACE = 0.2
"""Part of the time of H inner steps for which a quorum waits for the others."""
_LAST = 10
"""Multiples of the patience for which what an island has sent last waits for the others'."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One merge under way; times in seconds of the caller's clock."""

    began_s: float
    """When its first contribution was complete."""
    quorum_s: float | None = None
    """When half of all islands had contributed."""
    weights: Mapping[str, float] = {}
    """Of those that have contributed."""
    final: bool = False
    """Somebody's last contribution is in it."""


def contributed(
    before: Round | None, island: str, weight: float, *, present: int, now_s: float, final: bool = False
) -> Round:
    """The round once `island` has contributed, where `present` islands are there."""
    before = before or Round(began_s=now_s)
    weights = {**before.weights, island: weight}
    quorum_s = before.quorum_s
    if quorum_s is None and len(weights) >= math.ceil(present / 2):
        quorum_s = now_s
    return msgspec.structs.replace(before, weights=weights, quorum_s=quorum_s, final=before.final or final)


def why_closed(
    round_: Round, present: Collection[str], *, inner_steps: int, inner_s: float, patience_s: float, now_s: float
) -> str:
    """Why the merge is to be done now, in words; empty: it is not yet.

    Args:
        present: islands that are connected and train.
        inner_steps: H.
        inner_s: seconds of the slowest island's inner step; 0: not known.
        patience_s: the longest grace.
    """
    missing = sorted(set(present) - set(round_.weights))
    if not missing:
        return "all have contributed"
    if round_.quorum_s is None and len(round_.weights) < math.ceil(len(present) / 2):
        return ""
    quorum_s = round_.began_s if round_.quorum_s is None else round_.quorum_s
    grace_s = grace(inner_steps=inner_steps, inner_s=inner_s, patience_s=patience_s)
    if round_.final:  # nobody trains on it any more, and what others send last is larger
        grace_s = _LAST * patience_s
    if now_s - quorum_s < grace_s:
        return ""
    return f"a quorum has waited {grace_s:.3g} s for {', '.join(missing)}"


def grace(*, inner_steps: int, inner_s: float, patience_s: float) -> float:
    """Seconds for which a quorum waits: 0.2 * H * the inner step's time, at most the patience."""
    return min(patience_s, GRACE * inner_steps * inner_s) if inner_s > 0 else patience_s
