"""By how much each rank's numbers of a step exceed what is expected of them: of equal devices in the same step, and of
the rank's own past.

The one idea: the same step, where there are others to compare with. What slows all of them down at once, such as longer
sequences, is nobody's excess.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from ragtag.control.blame_excess import Beyond, Excess, noise_of, odds_of, of_others
from ragtag.control.blame_links import RingLinks
from ragtag.control.blame_seen import Seen
from ragtag.control.robust import log_ratio, median

_NOISE, _LEAST_PART, _UNSEEN_JUMP = 0.03, 0.03, 0.2
"""Least noise of a rank's computing as a part of it, and of everything else as a part of the usual step; differences
between steps before enough were seen."""
_LEAST_NOISE_S = 0.5e-3
_PAST_SPREAD = 1.25
"""How much more uncertain a difference from the own past is than one step."""
_REMEMBERED, _ENOUGH_WALLS, _LOOKS_EVERY = 32, 16, 4
_ODD = 3.0
"""Standard deviations from which on a number makes the next steps worth a look."""
_MEMORY_STEPS = 30
"""Steps within which slow computing is put down to memory that has run out; for as long as it lasts, then."""
_FAULTS = 20.0
"""Pages read from disk in a step, beyond four times as many as the others', that tell of too little memory."""


class Step(msgspec.Struct):
    """One step's excesses; lists are by rank, seconds."""

    number: int
    work_s: list[float]
    """All of reading, computing and updating."""
    compute_s: list[float]
    data_s: list[float]
    host_s: list[float]
    redo_s: list[float]
    link_s: list[float]
    """By link of the ring, in the step before, as are those that follow."""
    link_host_s: list[float]
    comm_s: float
    """All of it."""


class Rank:
    """What is followed of one rank."""

    __slots__ = (
        "change", "compute", "data", "faults", "has_changed", "host", "in_pieces", "limited_at", "link", "ran_out_at",
        "receiving",
    )  # fmt: skip

    def __init__(self) -> None:
        self.compute = Excess(relative=True)
        self.change = Beyond()
        """Its computing, beyond its own past only."""
        self.has_changed = False
        """Whether it has become slower, or its past is too short to tell."""
        self.data = Excess()
        self.host, self.link = Excess(bursts=True), Excess(bursts=True)
        self.receiving = Excess(bursts=True)
        """Waiting for a processor of what receives from others."""
        self.ran_out_at: int | None = None
        """The step in which its memory has run out last."""
        self.in_pieces = False
        """Whether it computes its share in smaller pieces than equal devices, because of its memory."""
        self.limited_at: int | None = None
        """The step in which that began, or was first seen."""
        self.faults = 0.0
        """Pages read from disk a step, beyond those of others."""

    @property
    def is_found(self) -> bool:
        """Whether its own work takes longer than it should."""
        return self.compute.is_found or self.data.is_found or self.host.is_found

    def short_of_memory(self, step: int) -> bool:
        """Whether slow computing comes of too little memory."""
        recently = self.limited_at is not None and step - self.limited_at <= _MEMORY_STEPS
        return recently or self.faults > _FAULTS


class Measure:
    """Follows all ranks; `observe` each step, in order.

    Args:
        hosts: by rank.
        kinds: by rank; equal where devices are expected to be equally fast.
    """

    def __init__(self, hosts: Sequence[str], kinds: Sequence[str]) -> None:
        self.ranks = [Rank() for _ in hosts]
        self.ring = RingLinks(hosts)
        self.usual_step_s = 0.0
        self.luck_s = 0.0
        """Standard deviation of the difference of two ranks' computing in one step."""
        self.num_seen = 0
        self._alike = [[r for r, kind in enumerate(kinds) if kind == each] for each in dict.fromkeys(kinds)]
        self._odds_of_compute = partial(odds_of, [rank.compute.beyond for rank in self.ranks])
        self._odds_of_change = partial(odds_of, [rank.change for rank in self.ranks])
        self._odds_of_data = partial(odds_of, [rank.data.beyond for rank in self.ranks])
        self._compute_numbers = [rank.compute for rank in self.ranks]
        self._data_numbers = [rank.data for rank in self.ranks]
        self._host_numbers = [rank.host for rank in self.ranks]
        self._receiving_numbers = [rank.receiving for rank in self.ranks]
        self._link_numbers = [rank.link for rank in self.ranks]
        self._least_noise_s = 0.0
        self._walls: deque[float] = deque(maxlen=_REMEMBERED)
        self._before: Seen | None = None

    @property
    def is_calm(self) -> bool:
        """Whether enough was seen to know what is usual, and the newest step was, for all ranks."""
        if self.num_seen <= _REMEMBERED:
            return False
        for rank in self.ranks:
            for number in (rank.compute, rank.data, rank.host, rank.link, rank.receiving):
                if number.is_found or (number.beyond.newest and number.beyond.newest[-1] > _ODD):
                    return False
        return True

    def observe(self, seen: Seen, *, accused: Sequence[int]) -> Step:
        """Take in one step; what it shows of those `accused` is not what is usual for them."""
        before, self._before = self._before or seen, seen
        self.num_seen += 1
        self._walls.append(seen.wall_s)
        if self.num_seen <= _ENOUGH_WALLS or self.num_seen % _LOOKS_EVERY == 0:
            self.usual_step_s = median(self._walls)
            self._least_noise_s = max(_LEAST_NOISE_S, _LEAST_PART * self.usual_step_s)
        self._memory(seen)
        waits = [seconds if present else None for seconds, present in zip(seen.host_s, seen.present)]
        host_s = self._waiting(self._host_numbers, waits, after=1)
        return Step(
            number=seen.step,
            work_s=[sum(each) for each in zip(seen.apply_s, seen.data_s, seen.redo_s, seen.compute_s)],
            compute_s=self._compute(seen, host_s, accused),
            data_s=self._data(seen, host_s, accused),
            host_s=host_s,
            redo_s=list(seen.redo_s),
            link_s=self._link(seen, accused),
            link_host_s=self._waiting(self._receiving_numbers, before.link_host_s, after=2),
            comm_s=before.comm_s,
        )

    def _memory(self, seen: Seen) -> None:
        for rank, own, other in zip(self.ranks, seen.faults, of_others(seen.faults)):
            if own or rank.faults:
                rank.faults = 0.7 * rank.faults + 0.3 * max(0.0, own - 4 * (other or 0.0))
        if min(seen.micro_batch) == max(seen.micro_batch) and not any(seen.ran_out):
            for rank in self.ranks:
                rank.in_pieces = False
            return
        for alike in self._alike:
            largest = max([seen.micro_batch[rank] for rank in alike])
            for r in alike:
                rank = self.ranks[r]
                if seen.ran_out[r]:
                    rank.ran_out_at = rank.limited_at = seen.step
                in_pieces = seen.micro_batch[r] < min(largest, seen.samples[r])
                if in_pieces and self.num_seen == 1:  # its memory has run out in an earlier generation
                    rank.limited_at = seen.step
                rank.in_pieces = in_pieces and rank.limited_at is not None

    def _compute(self, seen: Seen, host_s: Sequence[float], accused: Sequence[int]) -> list[float]:
        sizes = self._sizes(seen)
        levels = [
            seconds / size if present and not ran_out else None
            for seconds, size, present, ran_out in zip(seen.compute_s, sizes, seen.present, seen.ran_out)
        ]
        expected: list[float | None] = [None] * len(levels)
        spread = [1.0] * len(levels)
        for alike in self._alike:
            count = sum([levels[rank] is not None for rank in alike]) - 1
            for rank, other in zip(alike, of_others([levels[rank] for rank in alike])):
                expected[rank] = other
                if count > 0:  # a median of `count` noisy values is noisy itself
                    spread[rank] = (1 + 1.57 / count) ** 0.5
        common = self._common(levels)
        noise = noise_of(self._compute_numbers, _NOISE, _UNSEEN_JUMP)
        self.luck_s = 2**0.5 * noise * max(seen.compute_s)
        excess_s = [0.0] * len(levels)
        for r, (rank, level) in enumerate(zip(self.ranks, levels)):
            if level is None:
                rank.compute.skip()
                continue
            # What its processors did for others, beyond what others' do too, is no fault of the device.
            own = max(0.0, seen.compute_s[r] - host_s[r]) / sizes[r]
            beyond, base, since = 0.0, own, 0.0
            if other := expected[r]:
                beyond, base = log_ratio(own, other) / (noise * spread[r]), other
            if past := (rank.compute.usual or 0.0) * common[r]:
                since = log_ratio(own, past) / (noise * _PAST_SPREAD)
                if since > beyond or not other:
                    beyond, base = since, past
            excess_s[r] = max(0.0, (own - base) * sizes[r])
            if self.num_seen > 1:  # in the first, each device warms up in its own way
                rank.compute.follow(level, beyond, self._odds_of_compute, accused=r in accused)
                if past:
                    rank.change.add(since, self._odds_of_change, accused=r in accused)
                rank.has_changed = not past or rank.change.is_found
                _remember(rank.compute, level, accused=r in accused)
        return excess_s

    def _sizes(self, seen: Seen) -> list[float]:
        """Work of each rank in samples, fixed costs included: what devices of a kind have in common, so that noise in
        one's does not make others look slow."""
        sizes = list(map(float, seen.samples))
        if not any(map(any, seen.fixed)):
            return sizes
        for alike in self._alike:
            per_step, per_forward = (median([seen.fixed[rank][which] for rank in alike]) for which in (0, 1))
            for rank in alike:
                sizes[rank] += per_step + per_forward * seen.forwards[rank]
        return sizes

    def _common(self, levels: Sequence[float | None]) -> list[float]:
        """By rank, how much slower the others have become."""
        slower = [
            None if level is None or rank.compute.usual is None else level / rank.compute.usual
            for rank, level in zip(self.ranks, levels)
        ]
        return [1.0 if each is None else max(1.0, each) for each in of_others(slower)]

    def _data(self, seen: Seen, host_s: Sequence[float], accused: Sequence[int]) -> list[float]:
        rates = [
            seconds / samples if present else None
            for seconds, samples, present in zip(seen.data_s, seen.samples, seen.present)
        ]
        noise_s = self._noise_s(self._data_numbers)
        excess_s = [0.0] * len(rates)
        for r, (rank, (rate, other)) in enumerate(zip(self.ranks, _beside_others(rates))):
            if rate is None:
                rank.data.skip()
                continue
            own_s = max(0.0, seen.data_s[r] - host_s[r])
            over_s = 0.0 if other is None else own_s - other * seen.samples[r]
            excess_s[r] = max(0.0, over_s)
            if self.num_seen > 1:
                rank.data.follow(seen.data_s[r], over_s / noise_s, self._odds_of_data, accused=r in accused)
        return excess_s

    def _waiting(self, numbers: Sequence[Excess], values: Sequence[float | None], *, after: int) -> list[float]:
        """By how much each of `values` exceeds those of the others, followed in `numbers` after so many steps."""
        excess_s = [0.0] * len(values)
        known = [each for each in values if each is not None]
        if len(known) == len(values) and max(known) < self._least_noise_s:
            if self.num_seen > after:
                for number in numbers:
                    number.follow(0.0, 0.0)  # it makes no difference how little it was
            return excess_s
        noise_s = self._noise_s(numbers)
        for r, (number, (own_s, other_s)) in enumerate(zip(numbers, _beside_others(values))):
            if own_s is None:
                number.skip()
                continue
            excess_s[r] = max(0.0, own_s - (other_s or 0.0))
            if self.num_seen > after:
                number.follow(own_s, excess_s[r] / noise_s)
        return excess_s

    def _link(self, seen: Seen, accused: Sequence[int]) -> list[float]:
        excess_s = [0.0] * len(self.ranks)
        if self.num_seen < 2:
            return excess_s  # these are of the step before
        noise_s = self._noise_s(self._link_numbers)
        expected = self.ring.expected_s(seen.link_s, [rank.link.usual for rank in self.ranks])
        for r, (rank, under_way_s, base_s) in enumerate(zip(self.ranks, seen.link_s, expected)):
            excess_s[r] = max(0.0, under_way_s - base_s)
            if self.num_seen > 2:
                rank.link.follow(under_way_s, (under_way_s - base_s) / noise_s)
                _remember(rank.link, under_way_s, accused=bool(accused))
        return excess_s

    def _noise_s(self, numbers: Sequence[Excess]) -> float:
        return noise_of(numbers, self._least_noise_s, max(2 * _LEAST_NOISE_S, _UNSEEN_JUMP * self.usual_step_s))


def _remember(excess: Excess, value: float, *, accused: bool) -> None:
    if accused:
        excess.doubt()
    else:
        excess.remember(value)


def _beside_others(values: Sequence[float | None]) -> list[tuple[float | None, float | None]]:
    return list(zip(values, of_others(values)))
