"""How long a step would take under a plan: the ranks' speeds, replayed with the noise that was just seen.

The one idea: with noise the slowest of several ranks takes longer than any of them does on average, so a plan is
judged on the recent steps' own deviations, rank by rank, not on averages alone.
"""

from collections.abc import Sequence
from operator import add

import msgspec

from ragtag.control.observation import Observation, forwards
from ragtag.control.robust import appended, median, midmean
from ragtag.control.speed import Speed
from ragtag.core.values import Plan

_FEWEST_REPLAYED = 4
_RECENT = 8


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about all ranks; tuples are by rank."""

    speeds: tuple[Speed, ...]
    recent_apply_s: tuple[tuple[float, ...], ...]
    """Recent optimizer times of each rank, newest last."""
    apply_s: tuple[float, ...]
    """Usual seconds of each rank's optimizer: the midmean of the recent ones; 0: never measured."""
    recent_rest_s: tuple[float, ...] = ()
    """Recent parts of the step that no rank computed in: communication, the vote, reading."""
    presence_s: tuple[float, ...]
    """What each rank adds to everybody's step by having a share at all."""

    def rest_s(self) -> float:
        """Usual seconds of a step beside the slowest rank's work."""
        return median(self.recent_rest_s) if self.recent_rest_s else 0.0

    def rank_s(self, rank: int, samples: int, micro_batch: int, unit: int) -> float:
        """Predicted seconds of work of `rank` in a step with `samples`."""
        num_forwards = forwards(samples, unit=unit, micro_batch=micro_batch)
        return self.apply_s[rank] + self.speeds[rank].time_s(samples, num_forwards)


def cluster_of(world_size: int, presence_s: Sequence[float] = ()) -> Cluster:
    """Return a cluster of which nothing is known yet."""
    return Cluster(
        speeds=(Speed(),) * world_size,
        recent_apply_s=((),) * world_size,
        apply_s=(0.0,) * world_size,
        presence_s=tuple(presence_s) or (0.0,) * world_size,
    )


def observe_step(cluster: Cluster, seen: Observation, *, planned: bool = True) -> Cluster:
    """Return what is known after one more step; `planned`: every rank computed what the plan gave it."""
    slowest_s = max(map(add, seen.apply_s, seen.compute_s))
    rest_s = seen.wall_s - slowest_s - _presence_s(cluster, seen.samples)
    rest = (*cluster.recent_rest_s, max(rest_s, 0.0)) if rest_s < 1e9 else cluster.recent_rest_s
    recent, apply_s = list(cluster.recent_apply_s), list(cluster.apply_s)
    for rank, seconds in enumerate(seen.apply_s):
        if 0 < seconds < 1e9:
            recent[rank] = appended(recent[rank], seconds, _RECENT)
            apply_s[rank] = midmean(recent[rank])
    return msgspec.structs.replace(
        cluster,
        speeds=tuple(
            Speed.observe(speed, samples, micro_batches, seconds, planned)
            for speed, samples, micro_batches, seconds in zip(
                cluster.speeds, seen.samples, seen.micro_batches, seen.compute_s
            )
        ),
        recent_apply_s=tuple(recent),
        apply_s=tuple(apply_s),
        recent_rest_s=rest[-_RECENT:],
    )


def predict_step_s(cluster: Cluster, plan: Plan) -> float:
    """Return the median seconds of a step under `plan`, communication included."""
    apply_s = cluster.apply_s
    working = [rank for rank, share in enumerate(plan.shares) if share]
    compute_s = [
        cluster.rank_s(rank, plan.shares[rank], plan.micro_batch[rank], plan.unit) - apply_s[rank] for rank in working
    ]
    deviations = [cluster.speeds[rank].deviations for rank in working]
    steps = min((len(values) for values in deviations), default=0)
    if steps < _FEWEST_REPLAYED:
        steps, deviations = 1, [(1.0,) for _ in working]
    slowest = []
    for step in range(-steps, 0):
        ends = [apply_s[rank] + seconds * values[step] for rank, seconds, values in zip(working, compute_s, deviations)]
        slowest.append(max([*ends, *apply_s]))
    return median(slowest) + cluster.rest_s() + _presence_s(cluster, plan.shares)


def _presence_s(cluster: Cluster, samples: Sequence[int]) -> float:
    total = 0.0
    for seconds, count in zip(cluster.presence_s, samples):
        total += seconds if count else 0.0
    return total
