"""The best shares where every device holds the whole model, and the exact variants of it.

The one idea: a way (which micro-batch sizes and recompute are allowed) and a subset of ranks leave one question, how
many units each rank gets, and `allocate` answers it optimally; the reduction's cost depends on the subset alone.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import msgspec

from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.device import largest_micro_batch
from ragtag.cost.problem import Problem
from ragtag.cost.reduction import hidden_part, num_buckets
from ragtag.cost.step import noise
from ragtag.plan.allocate import Seat, allocate
from ragtag.plan.coarse import coarse
from ragtag.plan.load import Load, Option, own_options
from ragtag.plan.rings import Hosts, Rings
from ragtag.plan.room import Counts, Room, Rows
from ragtag.plan.subset import Subset, best_subset

_SIZES_TRIED = 6
_COST_OF_A_KIND = 40
"""What working out the share of one kind of device takes, beside placing one more device of it."""


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
        self.cost = 0
        """What was worked out so far: ranks, each time their shares were found."""
        self._rings = Rings(problem)
        self._loads: dict[tuple[int, int | None], Load] = {}
        self._sizes = [None] if way.own_size or self.unit > 1 else _common_sizes(problem)
        self._solved: dict[tuple[Subset, int | None], tuple[float, tuple[int, ...]] | None] = {}
        self._rooms: dict[int | None, tuple[Rows, float, Room]] = {}
        self._hint_s = 0.0

    def step_s(self, subset: Subset) -> float | None:
        """Return the seconds of a step on `subset`, or None where it does not fit there."""
        solved = self._best_size(subset, self._sizes)
        return None if solved is None else solved[0]

    def fits(self, rank: int) -> bool:
        """Whether `rank` has memory for the model and the least that is computed at a time."""
        return any(self._load(rank, size).limit != 0 for size in self._sizes)

    def better(self, rows: Rows, counts: Counts, step_s: float) -> tuple[Subset, float] | None:
        """Return the subset with so many ranks of each row whose step is shortest, and its seconds, if that is less
        than `step_s`; most often nothing is."""
        hosts = tuple([host for row, count in zip(rows, counts) for host in (row.host,) * count])
        rings_s, vote_s = self._rings.rings_s(hosts), self._rings.vote_s(hosts)
        self.cost += (len(hosts) + len(rows) * len(self._sizes)) // 2
        first_s, last_s, best = sum(rings_s), rings_s[-1], None
        for size in self._sizes:
            while True:
                room = self._room(rows, size, step_s)
                subset = room.pick(counts, first_s, last_s, vote_s)
                self.cost += _COST_OF_A_KIND // 2 * room.worked_out()
                solved = None if subset is None else self._solve(subset, size)
                if solved is None or solved[0] >= step_s:
                    break
                step_s, best = solved[0], subset
        return None if best is None else (best, step_s)

    def _room(self, rows: Rows, size: int | None, step_s: float) -> Room:
        kept = self._rooms.get(size)
        if kept is None or kept[0] is not rows or kept[1] != step_s:
            alike, problem = self.problem.alike, self.problem
            room = Room(
                rows,
                partial(self._load, size=size),
                lambda rank: hidden_part(problem, alike[rank]),
                self.num_units,
                step_s,
            )
            kept = self._rooms[size] = (rows, step_s, room)
        return kept[2]

    def best(self, ranks: Sequence[int] | None = None, *, near: Subset | None = None) -> Candidate | None:
        """Return the best candidate on the best subset of `ranks` (None: of all).

        Where not all subsets can be looked at, only what is like `near` is, if that is given.
        """
        subset = best_subset(self._coarse, ranks, near)
        return None if subset is None else self.candidate(subset)

    @cached_property
    def _coarse(self) -> "Solver":
        """The one that searches for who takes part."""
        problem = coarse(self.problem)
        return self if problem is self.problem else Solver(problem, self.way, self._islands)

    def candidate(self, subset: Subset) -> Candidate | None:
        """Return the best candidate in which all of `subset` take part, some perhaps with no share."""
        solved = self._best_size(subset, self._sizes_for(subset)) or self._best_size(subset, self._sizes)
        if solved is None:
            return None
        _, units, size = solved
        seats = self._seats(subset, size)
        parts, start = [], 0
        batch = self.problem.global_batch_size
        for rank, seat, count in zip(subset, seats, units):
            samples = min(start + count * self.unit, batch) - start
            start += samples
            chosen = seat.load.choose(count, seat.lines) if count else Option(micro_batch=size)
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

    def _sizes_for(self, subset: Subset) -> Sequence[int | None]:
        """The micro-batch sizes worth trying: where devices were taken as equal, the one that was best then."""
        if self._coarse is self:
            return self._sizes
        found = self._coarse._best_size(subset, self._coarse._sizes)
        if found is None:
            return self._sizes
        _, _, size = found
        return [size]

    def _best_size(
        self, subset: Subset, sizes: Sequence[int | None]
    ) -> tuple[float, tuple[int, ...], int | None] | None:
        found = [(*solved, size) for size in sizes if (solved := self._solve(subset, size)) is not None]
        # The largest size of equals: fewer, larger micro-batches are never worse for what was not modelled.
        return min(found, key=lambda item: (item[0], -(item[2] or 1 << 60)), default=None)

    def _solve(self, subset: Subset, size: int | None) -> tuple[float, tuple[int, ...]] | None:
        """The seconds of a step and each rank's units."""
        key = (subset, size)
        if key not in self._solved:
            seats = self._seats(subset, size)
            self.cost += len(subset) + _COST_OF_A_KIND * len(set(map(id, seats)))
            shared = None
            if all(seat.load.limit != 0 for seat in seats):
                shared = allocate(self.num_units, seats, hint_s=self._hint_s)
            if shared is None:
                self._solved[key] = None
            else:
                units, self._hint_s = shared
                luck = noise([self.problem.alike[rank].jitter for rank in subset]) - 1
                noise_s = luck * _most_work_s(seats, units) if luck else 0.0
                vote_s = max(map(self._rings.vote_s, self._hosts(subset).values()))
                self._solved[key] = (self._hint_s + noise_s + vote_s, units)
        return self._solved[key]

    def _hosts(self, subset: Subset) -> dict[int, Hosts]:
        """By island."""
        ranks = self.problem.ranks
        if self._islands is None:
            return {0: tuple([ranks[rank].host for rank in subset])}
        hosts: dict[int, list[str]] = {}
        for rank in subset:
            hosts.setdefault(self._islands[rank], []).append(ranks[rank].host)
        return {island: tuple(names) for island, names in hosts.items()}

    def _seats(self, subset: Subset, size: int | None) -> list[Seat]:
        hosts, alike = self._hosts(subset), self.problem.alike
        seats: dict[tuple[int, int], Seat] = {}
        result = []
        for rank in subset:
            device = alike[rank]
            island = 0 if self._islands is None else self._islands[rank]
            key = (id(device), island)
            if key not in seats:
                lines = self._rings.lines(hosts[island], device)
                seats[key] = Seat(load=self._load(rank, size), lines=lines)
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
            self._loads[key] = Load(device, options, limit=limit, unit=self.unit, hides=num_buckets(self.problem) > 1)
        return self._loads[key]


def _most_work_s(seats: Sequence[Seat], units: Sequence[int]) -> float:
    """The longest forward and backward."""
    pairs = {(id(seat), count): seat for seat, count in zip(seats, units)}
    return max(seat.load.work_s(count, seat.lines) for (_, count), seat in pairs.items())


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
