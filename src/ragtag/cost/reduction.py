"""What of a reduction a backward hides: buckets become complete in its course and travel one after the other.

The one idea: each bucket gives a line, "complete so long before the backward's end, so many seconds from then on for it
and all behind it"; what is left after the backward is the highest of these lines at that backward's length.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from ragtag.core.profile import DeviceProfile
from ragtag.cost.comm import ring_all_reduce_s, vote_s
from ragtag.cost.problem import Problem


class Line(NamedTuple):
    """One bucket: the part of the backward still to come when it is complete, and the seconds of all from it on."""

    hidden: float
    left_s: float

    def after_s(self, backward_s: float) -> float:
        """Return how long after a backward of `backward_s` the reduction ends on this bucket's account."""
        return self.left_s - self.hidden * backward_s


def num_buckets(problem: Problem) -> int:
    """Return in how many pieces gradients are reduced."""
    return len(problem.model.bucket_bytes) or max(1, ceil(problem.model.gradient_bytes / problem.bucket_bytes))


def bucket_rings_s(problem: Problem, hosts: Sequence[str]) -> tuple[float, ...]:
    """Return the seconds that the ring over ranks on `hosts` takes for each bucket, in their order."""
    if problem.model.bucket_bytes:
        known = {size: ring_all_reduce_s(size, hosts, problem.link) for size in set(problem.model.bucket_bytes)}
        return tuple(known[size] for size in problem.model.bucket_bytes)
    buckets = num_buckets(problem)
    return (ring_all_reduce_s(problem.model.gradient_bytes / buckets, hosts, problem.link),) * buckets


def exposed_ring_s(problem: Problem, hosts: Sequence[str]) -> tuple[float, float, float]:
    """Return (first, last, vote) for a reduction of the model's gradients over ranks on `hosts`.

    The sum is complete `first` seconds after a rank had its first bucket (`hidden_part`) or `last` seconds after it had
    its last one, whichever is later; where buckets are unequal, one in between may make it later still (`lines`).
    """
    if len(hosts) < 2:
        return 0.0, 0.0, 0.0
    rings_s = bucket_rings_s(problem, hosts)
    return sum(rings_s), rings_s[-1], vote_s(hosts, problem.link)


def hidden_part(problem: Problem, device: DeviceProfile) -> float:
    """Return the part of a backward on `device` that is still to come when its first bucket is complete."""
    return 1 - ready_parts(problem, device)[0]


def ready_parts(problem: Problem, device: DeviceProfile) -> tuple[float, ...]:
    """Return, for each bucket, the part of a backward on `device` after which it is complete.

    As measured; otherwise as if backward made gradients evenly. A bucket is closed once it is full, so the first of two
    may hold most of the model and be complete late.
    """
    buckets = num_buckets(problem)
    if len(device.bucket_ready) == buckets:
        return device.bucket_ready
    sizes = problem.model.bucket_bytes or (1,) * buckets
    return tuple(ready / sum(sizes) for ready in accumulate(sizes))


def lines(problem: Problem, device: DeviceProfile, rings_s: Sequence[float]) -> tuple[Line, ...]:
    """Return the buckets' lines for `device`, those that are nowhere the highest left out; `rings_s` by bucket.

    One of them is never below 0: a rank does not go on before its backward has ended.
    """
    ready = ready_parts(problem, device)
    left_s = list(accumulate(reversed(rings_s)))[::-1]
    if not problem.model.bucket_bytes:  # equal ones, evenly: all meet in one point
        return tuple({Line(1 - ready[0], left_s[0]): None, Line(0.0, left_s[-1]): None})
    highest: list[Line] = []
    # From the steepest fall to the gentlest, as an upper envelope is built.
    for line in (*(Line(1 - part, seconds) for part, seconds in zip(ready, left_s, strict=True)), Line(0.0, 0.0)):
        while highest and highest[-1].left_s <= line.left_s:
            highest.pop()
        while len(highest) > 1 and _meet(highest[-2], line) <= _meet(highest[-2], highest[-1]):
            highest.pop()
        if not highest or highest[-1].hidden > line.hidden:
            highest.append(line)  # of equally steep ones the first is the highest
    return tuple(highest)


def _meet(first: Line, second: Line) -> float:
    """At which backward two lines are equally high."""
    return (first.left_s - second.left_s) / (first.hidden - second.hidden)
