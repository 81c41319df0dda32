"""The one-line reasons of decisions, in numbers a person can check."""

from collections.abc import Sequence

from ragtag.control.chunks import RingStep, ring_work_s
from ragtag.control.parking import Parked
from ragtag.control.predict import Cluster
from ragtag.control.speed import Speed
from ragtag.core.values import Plan


def moving(cluster: Cluster, old: Plan, new: Plan, old_s: float, new_s: float, because: str) -> str:
    """Why work moves between ranks."""
    known = [(speed.level_s, rank) for rank, speed in enumerate(cluster.speeds) if speed.known and new.shares[rank]]
    text = shares(old, new)
    if because:
        return f"{text}: the old ones are {because}"
    (fast_s, fast), (slow_s, slow) = min(known), max(known)
    return f"{text}: rank {slow} takes {_ms(slow_s)} a sample, rank {fast} {_ms(fast_s)}; {_saved(old_s, new_s)}"


def shares(old: Plan, new: Plan) -> str:
    """How they change."""
    return f"shares {_listed(old.shares)} -> {_listed(new.shares)}"


def parking(rank: int, cluster: Cluster, old: Plan, new: Plan, alone_s: float, old_s: float, new_s: float) -> str:
    """Why `rank` loses its share."""
    text = f"rank {rank} parked: {_ms(alone_s)} for its first {samples(old.unit)} alone"
    if cluster.presence_s[rank]:
        text += f", and {_ms(cluster.presence_s[rank])} that its computing adds to everybody's step"
    return f"{text}; shares {_listed(old.shares)} -> {_listed(new.shares)}; {_saved(old_s, new_s)}"


def unparking(rank: int, cluster: Cluster, old: Plan, new: Plan, old_s: float, new_s: float) -> str:
    """Why `rank` gets a share again."""
    return (
        f"rank {rank} works again: {_ms(cluster.speeds[rank].level_s)} a sample; "
        f"shares {_listed(old.shares)} -> {_listed(new.shares)}; {_saved(old_s, new_s)}"
    )


def trying(entry: Parked, speed: Speed, plan: Plan, step: int) -> str:
    """Why a parked rank is tried."""
    known = f"it took {_ms(speed.level_s)} a sample then" if speed.level_s else "its speed was never measured"
    return (
        f"rank {entry.rank} tried with {samples(plan.unit)}: without a share for {step - entry.since} steps, {known}; "
        f"shares {_listed(plan.shares)}"
    )


def owning(rank: int, ring: RingStep, work_s: Sequence[float], old: Plan, new: Plan, old_s: float, new_s: float) -> str:
    """Why ranks own other parts of the gradient; `rank` is the one that everybody waits for."""
    before, after = (ring_work_s(plan.chunk_weights, ring.add_s, ring.send_s)[rank] for plan in (old, new))
    return (
        f"rank {rank} owns {_part(old, rank)} -> {_part(new, rank)} of the gradient: its own work takes "
        f"{_ms(work_s[rank])}, and its part in adding gradients up {_ms(before)} -> {_ms(after)}; "
        f"{_saved(old_s, new_s)}"
    )


def _part(plan: Plan, rank: int) -> str:
    return f"{100 * plan.chunk_weights[rank] / sum(plan.chunk_weights):.0f} %"


def _listed(shares: Sequence[int]) -> str:
    return ", ".join(map(str, shares))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def samples(count: int) -> str:
    """So many of them."""
    return "1 sample" if count == 1 else f"{count} samples"


def _saved(old_s: float, new_s: float) -> str:
    percent = 100 * (1 - new_s / old_s) if old_s > 0 else 0.0
    change = f"{percent:.0f} % less" if percent >= 0 else f"{-percent:.0f} % more"
    return f"step {old_s:.3g} -> {new_s:.3g} s, {change}"
