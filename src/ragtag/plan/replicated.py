"""The best shares where every device holds the whole model, and the exact variants of it.

The one idea: a way (which micro-batch sizes and recompute are allowed) and a subset of ranks leave one question, how
many units each rank gets, and `allocate` answers it optimally; the reduction's cost depends on the subset alone.
"""

from collections.abc import Sequence

import msgspec

from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.device import largest_micro_batch
from ragtag.cost.problem import Problem
from ragtag.cost.step import exposed_ring_s, noise, num_buckets
from ragtag.plan.allocate import Seat, allocate
from ragtag.plan.load import Load, Option, own_options
from ragtag.plan.subset import Subset, best_subset

_SIZES_TRIED = 6


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """What devices may choose."""

    name: str
    own_size: bool = False
    """Each device has its own micro-batch size; otherwise one size is the most for all."""
    recompute: bool = False
    not_yet: str = ""


class Solver:
    """Answers for one problem and one way; keeps what it knows about devices.

    `islands` gives each rank's island: reduction is within islands then.
    """

    def __init__(self, problem: Problem, way: Way, islands: Sequence[int] | None = None) -> None:
        self.problem = problem
        self.way = way
        self._islands = islands
        self.unit = problem.model.unit
        self.num_units = -(-problem.global_batch_size // self.unit)
        self._hidden = 1 - 1 / num_buckets(problem)
        self._loads: dict[tuple[int, int | None], Load] = {}
        self._sizes = [None] if way.own_size or self.unit > 1 else _common_sizes(problem)
        self._solved: dict[Subset, tuple[float, tuple[int, ...], int | None] | None] = {}
        self._hint_s = 0.0

    def step_s(self, subset: Subset) -> float | None:
        """Return the seconds of a step on `subset`, or None where it does not fit there."""
        solved = self._solve(subset)
        return None if solved is None else solved[0]

    def best(self, ranks: Sequence[int] | None = None) -> Candidate | None:
        """Return the best candidate on the best subset of `ranks` (None: of all)."""
        subset = best_subset(self.problem, self.step_s, ranks)
        return None if subset is None else self.candidate(subset)

    def candidate(self, subset: Subset) -> Candidate | None:
        """Return the best candidate in which all of `subset` take part, some perhaps with no share."""
        solved = self._solve(subset)
        if solved is None:
            return None
        _, units, size = solved
        seats = self._seats(subset, size)
        parts, start = [], 0
        batch = self.problem.global_batch_size
        for rank, seat, count in zip(subset, seats, units):
            samples = min(start + count * self.unit, batch) - start
            start += samples
            chosen = seat.load.choose(count, seat.first_s, seat.last_s) if count else Option(micro_batch=size)
            parts.append(
                Part(
                    device=self.problem.ranks[rank].name,
                    samples=samples,
                    micro_batch=self.unit if self.unit > 1 else chosen.micro_batch or size or max(samples, 1),
                    recompute=chosen.recompute,
                    island=0 if self._islands is None else self._islands[rank],
                )
            )
        inside = set(subset)
        return Candidate(
            name=self.way.name,
            layout="replicated" if self._islands is None else "islands",
            parts=tuple(parts),
            left_out=tuple(rank.name for index, rank in enumerate(self.problem.ranks) if index not in inside),
            unit=self.unit,
            not_yet=self.way.not_yet,
        )

    def _solve(self, subset: Subset) -> tuple[float, tuple[int, ...], int | None] | None:
        if subset not in self._solved:
            found = []
            extra_s = self._vote_s(subset)
            jitters = [self.problem.alike[rank].jitter for rank in subset]
            factor = noise(jitters)
            for size in self._sizes:
                shared = allocate(self.num_units, self._seats(subset, size), hint_s=self._hint_s)
                if shared is not None:
                    self._hint_s = shared[1]
                    found.append((shared[1] * factor + extra_s, shared[0], size))
            # The largest size of equals: fewer, larger micro-batches are never worse for what was not modelled.
            self._solved[subset] = min(found, key=lambda item: (item[0], -(item[2] or 1 << 60)), default=None)
        return self._solved[subset]

    def _vote_s(self, subset: Subset) -> float:
        return max(vote for _, _, vote in self._rings(subset).values())

    def _rings(self, subset: Subset) -> dict[int, tuple[float, float, float]]:
        hosts: dict[int, list[str]] = {}
        for rank in subset:
            hosts.setdefault(0 if self._islands is None else self._islands[rank], []).append(
                self.problem.ranks[rank].host
            )
        return {island: exposed_ring_s(self.problem, names) for island, names in hosts.items()}

    def _seats(self, subset: Subset, size: int | None) -> list[Seat]:
        rings = self._rings(subset)
        seats: dict[tuple[int, int], Seat] = {}
        result = []
        for rank in subset:
            island = 0 if self._islands is None else self._islands[rank]
            key = (id(self.problem.alike[rank]), island)
            if key not in seats:
                first_s, last_s, _ = rings[island]
                seats[key] = Seat(load=self._load(rank, size), first_s=first_s, last_s=last_s)
            result.append(seats[key])
        return result

    def _load(self, rank: int, size: int | None) -> Load:
        device = self.problem.alike[rank]
        key = (id(device), size)
        if key not in self._loads:
            limit = None
            if self.way.own_size or self.unit > 1:
                options = own_options(device, unit=self.unit, recompute=self.way.recompute)
            else:
                largest = largest_micro_batch(device)
                options = () if largest == 0 else (Option(micro_batch=size),)
                if largest is not None and (size is None or largest < size):
                    limit = largest
            self._loads[key] = Load(device, options, limit=limit, unit=self.unit, hidden=self._hidden)
        return self._loads[key]


def even(problem: Problem) -> Candidate | None:
    """Return what stock data parallelism does: all devices, equal shares, the micro-batch of the smallest one."""
    unit, batch = problem.model.unit, problem.global_batch_size
    num_units, num_ranks = -(-batch // unit), len(problem.ranks)
    largest = [largest_micro_batch(device) for device in problem.alike]
    smallest = min((size for size in largest if size is not None), default=batch)
    if smallest < min(unit, batch):
        return None
    parts, start = [], 0
    for index, rank in enumerate(problem.ranks):
        count = num_units // num_ranks + (index < num_units % num_ranks)
        samples = min(start + count * unit, batch) - start
        start += samples
        size = unit if unit > 1 else min(smallest, max(-(-batch // num_ranks), 1))
        parts.append(Part(device=rank.name, samples=samples, micro_batch=size))
    return Candidate(name="even shares (as DDP)", layout="replicated", parts=tuple(parts), unit=unit)


def _common_sizes(problem: Problem) -> list[int | None]:
    """Sizes worth trying as the most for all: what fits one of the devices just so, or no limit."""
    largest = {largest_micro_batch(device) for device in problem.alike}
    fitting = sorted(size for size in largest if size and size < problem.global_batch_size)
    if len(fitting) > _SIZES_TRIED:
        last = len(fitting) - 1
        fitting = sorted({fitting[last * index // (_SIZES_TRIED - 1)] for index in range(_SIZES_TRIED)})
    return [None, *reversed(fitting)]
