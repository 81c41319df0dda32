"""Who holds the others up, and why: from what each rank itself measured, and said in its votes.

The one idea: every rank's step takes as long as the slowest rank's, so step times blame nobody. Blame is for seconds
that the others would not have lost without one rank's excess (over equal devices, over its own past): a slow rank with
a fair share is no finding, and a finding ends once shares have moved.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ragtag.control import blame_words
from ragtag.control.blame_excess import WINDOW
from ragtag.control.blame_measure import Measure, Step
from ragtag.control.blame_seen import Seen, seen_of

__all__ = ["Blame", "Cause", "Finding", "Seen", "seen_of"]

Cause: TypeAlias = Literal["compute", "data", "link", "memory", "host"]
"""Its device, its loader, its connection, too little memory, or other work on its processors."""

_LEAST_COST, _LEAST_PART = 0.3, 0.06
"""Usual steps that the others must have lost within the window: 3 % of it; and of one step in at least two."""
_MOSTLY = 6
"""Steps of the window that it must have cost something in where a rank is as slow as it has long been."""
_LUCK = 2.0
"""Standard deviations by which that must be beyond luck: a slow rank with a share to match is last now and then, as
everybody is."""
_CALM = 5
_HARDLY = 0.02
"""Part of a usual step; a finding that has cost less on average over the newest `_CALM` steps is over."""
_STALL = 5.0
"""Usual steps that a single step must have cost to be told of although it is alone."""
_NEWEST = 3
"""Steps from which the cause is told."""
_EXPLAINS = 0.5
"""Part of an excess that waiting for a processor must make up to be its cause."""
_SURELY = 5
"""Steps in a row that another cause must have been the greater one to take the place of the first."""
_GROWN = 2.0
"""Times as much as was told that a finding must cost in each of the newest `_CALM` steps to be told again."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rank holds the others up. It comes when that is found, again, with the same `since_step`, when it costs twice
    as much as was told, and when it is `over`."""

    step: int
    rank: int
    cause: Cause
    since_step: int
    lost_s: float
    """Seconds that each step takes longer because of it; where it is over, of all its steps on average."""
    text: str
    over: bool = False


class _Charge(msgspec.Struct, kw_only=True):
    """What one rank is charged with."""

    rank: int
    cause: Cause
    lost_s: list[float]
    """By step of the window; negative where others took longer."""
    luck_s: float = 0.0
    """Standard deviation of one step's."""
    links: tuple[int, ...] = ()


class _Open(msgspec.Struct, kw_only=True):
    """A finding that is not over."""

    finding: Finding
    links: tuple[int, ...]
    because: str
    all_lost_s: float
    """Since it began."""
    last_step: int
    """That cost a good part of that."""
    lost_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_CALM))
    otherwise: int = 0
    """Steps in a row for which another cause has been the greater one."""

    @property
    def mean_lost_s(self) -> float:
        """Of the newest steps."""
        return sum(self.lost_s) / len(self.lost_s)


class Blame:
    """Shown every committed step of one generation, in order; returns what begins or ends.

    Args:
        names: of the devices, by rank.
        hosts: by rank.
        kinds: by rank; equal where devices are expected to be equally fast.
    """

    def __init__(self, names: Sequence[str], hosts: Sequence[str], kinds: Sequence[str]) -> None:
        assert len(names) == len(hosts) == len(kinds), "one name, host and kind a rank"
        self._people = [f"rank {rank} ({name} on {host})" for rank, (name, host) in enumerate(zip(names, hosts))]
        self._hosts, self._kinds = tuple(hosts), tuple(kinds)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._measure = Measure(self._hosts, self._kinds)
        self._window: deque[Step] = deque(maxlen=WINDOW)
        self._seen: Seen | None = None
        self._open: dict[int, _Open] = {}
        self._told = [0] * len(self._people)
        """By rank, the step up to which all it has cost belongs to a finding that is over."""

    @property
    def usual_step_s(self) -> float:
        """Median of the newest steps that were shown."""
        return self._measure.usual_step_s

    @property
    def is_calm(self) -> bool:
        """Whether enough was seen to know what is usual, and the newest step was, for all."""
        return not self._open and self._measure.is_calm

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those that are not over, by rank."""
        return tuple(self._open[rank].finding for rank in sorted(self._open))

    def observe(self, seen: Seen) -> tuple[Finding, ...]:
        """Take in one step."""
        if len(self._people) < 2 or len(seen.samples) != len(self._people):
            return ()
        if self._window and seen.step <= self._window[-1].number:  # an older state was loaded
            ended = tuple([self._end(self._open[rank], seen.step) for rank in list(self._open)])
            self._begin_anew()
            return ended + self.observe(seen)
        self._seen = seen
        self._window.append(self._measure.observe(seen, accused=tuple(self._open)))
        charges = self._charges()
        said = [finding for rank in list(self._open) for finding in self._go_on(rank, charges.get(rank))]
        for rank, charge in charges.items():
            if rank not in self._open:
                said += self._begin(rank, charge)
        return tuple(said) or self._stalls()

    # ---- what each rank is charged with

    def _charges(self) -> dict[int, _Charge]:
        """By rank, what it has cost the others, put down to what has cost most of it."""
        step, ranks = self._window[-1].number, self._measure.ranks
        suspects = [r for r, rank in enumerate(ranks) if rank.is_found or rank.short_of_memory(step)]
        charges = self._own_work(suspects) if suspects else {}
        for charge in self._on_links():
            known = charges.get(charge.rank)
            if known is None or sum(charge.lost_s) > sum(known.lost_s):
                charges[charge.rank] = charge
        return charges

    def _own_work(self, suspects: Sequence[int]) -> dict[int, _Charge]:
        """What the step would have been without all of their excesses, none of them is to blame for."""
        lost_s: dict[int, list[float]] = {rank: [] for rank in suspects}
        for step in self._window:
            counted = {rank: self._counted_s(rank, step) for rank in suspects}
            without_s = max([work_s - counted.get(rank, 0.0) for rank, work_s in enumerate(step.work_s)])
            for rank, counted_s in counted.items():
                lost_s[rank].append(min(counted_s, step.work_s[rank] - without_s))
        luck_s = self._measure.luck_s
        return {r: _Charge(rank=r, cause=self._own_cause(r), lost_s=lost_s[r], luck_s=luck_s) for r in suspects}

    def _counted_s(self, rank: int, step: Step) -> float:
        """Those of a rank's excesses in a step that are no luck."""
        of = self._measure.ranks[rank]
        parts = ((of.compute, step.compute_s), (of.data, step.data_s), (of.host, step.host_s))
        return sum([excess_s[rank] for number, excess_s in parts if number.is_found]) + step.redo_s[rank]

    def _own_cause(self, rank: int) -> Cause:
        of, newest = self._measure.ranks[rank], list(self._window)[-_NEWEST:]
        compute_s = sum([step.compute_s[rank] for step in newest]) if of.compute.is_found else 0.0
        data_s = sum([step.data_s[rank] for step in newest]) if of.data.is_found else 0.0
        host_s = sum([step.host_s[rank] for step in newest]) if of.host.is_found else 0.0
        memory_s = sum([step.redo_s[rank] for step in self._window])
        entry = self._open.get(rank)
        still = entry is not None and entry.finding.cause == "memory" and of.in_pieces
        if still or of.short_of_memory(self._window[-1].number):
            memory_s, compute_s = memory_s + compute_s, 0.0
        parts: Mapping[Cause, float] = {"memory": memory_s, "host": host_s, "data": data_s, "compute": compute_s}
        return max(parts, key=lambda cause: parts[cause])

    def _on_links(self) -> list[_Charge]:
        """Of ranks whose links are slow, and of those who keep messages waiting because they are not let run."""
        ranks, newest = self._measure.ranks, list(self._window)[-_NEWEST:]
        found = {link for link, rank in enumerate(ranks) if rank.link.is_found}
        if not found:
            return []
        kept: dict[int, list[int]] = {}
        for link in sorted(found):
            under_way_s = sum([step.link_s[link] for step in newest])
            for end in (link, (link - 1) % len(ranks)):
                waited_s = sum([step.link_host_s[end] for step in newest])
                if ranks[end].host.is_found or waited_s >= _EXPLAINS * under_way_s:
                    found.discard(link)
                    if ranks[end].host.is_found or ranks[end].receiving.is_found:  # else everybody is kept waiting
                        kept.setdefault(end, []).append(link)
                    break
        charges = [self._linked(rank, "host", tuple(links)) for rank, links in kept.items()]
        for rank, entry in self._open.items():
            if entry.links and found.issuperset(entry.links):  # it is still these, and no other rank's
                charges.append(self._linked(rank, entry.finding.cause, entry.links))
                found.difference_update(entry.links)
        slow = self._measure.ring.slow(found, [rank.link for rank in ranks])
        return charges + [self._linked(rank, "link", links) for rank, links in slow.items()]

    def _linked(self, rank: int, cause: Cause, links: tuple[int, ...]) -> _Charge:
        """What slow links cost is at most all of communication."""
        lost_s = [min(sum([step.link_s[link] for link in links]), step.comm_s) for step in self._window]
        return _Charge(rank=rank, cause=cause, lost_s=lost_s, links=links)

    # ---- what begins, goes on and ends

    def _begin(self, rank: int, charge: _Charge) -> list[Finding]:
        counted = [(step.number, s) for step, s in zip(self._window, charge.lost_s) if step.number > self._told[rank]]
        usual_s = self._measure.usual_step_s
        # Memory does not run out by luck; messages are late for many a reason; and who has long been slower than its
        # equals may have a share to match.
        fewest, times = (1, 1) if charge.cause == "memory" else (4, 3) if charge.links else (2, 1)
        if charge.cause == "compute" and not self._measure.ranks[rank].has_changed:
            fewest = _MOSTLY
        luck_s = 0.0 if charge.cause == "memory" else charge.luck_s
        run = _costliest(counted, least_s=_LEAST_PART * usual_s, free_s=_HARDLY * usual_s, luck_s=luck_s)
        if run.num_costly < fewest or run.beyond_luck_s < times * _LEAST_COST * usual_s:
            return []
        earlier = bool(charge.links)  # what is said of links is of the step before
        finding = Finding(
            step=self._window[-1].number,
            rank=rank,
            cause=charge.cause,
            since_step=run.first - earlier,
            lost_s=run.lost_s / (run.last - run.first + 1),
            text="",
        )
        because = self._because(finding, charge.links)
        finding = msgspec.structs.replace(finding, text=self._text(finding, because))
        self._open[rank] = _Open(
            finding=finding,
            links=charge.links,
            because=because,
            all_lost_s=run.lost_s,
            last_step=run.last - earlier,
        )
        return [finding]

    def _go_on(self, rank: int, charge: _Charge | None) -> list[Finding]:
        """An open finding may be over, cost more, or turn out to have another cause."""
        entry, number = self._open[rank], self._window[-1].number
        hardly_s = _HARDLY * self._measure.usual_step_s
        entry.lost_s.append(charge.lost_s[-1] if charge else 0.0)
        entry.otherwise = entry.otherwise + 1 if charge and charge.cause != entry.finding.cause else 0
        if entry.lost_s[-1] > max(hardly_s, entry.finding.lost_s / 4) and not entry.otherwise:
            entry.all_lost_s += entry.lost_s[-1]
            entry.last_step = number - bool(entry.links)
        if len(entry.lost_s) < _CALM:
            return []
        if entry.mean_lost_s < hardly_s or entry.otherwise >= _SURELY:
            del self._open[rank]
            self._told[rank] = number - entry.otherwise
            return [self._end(entry, number)]
        if charge is not None and not entry.otherwise and min(entry.lost_s) >= _GROWN * entry.finding.lost_s:
            entry.because = self._because(entry.finding, charge.links)
            finding = msgspec.structs.replace(entry.finding, step=number, lost_s=entry.mean_lost_s)
            entry.finding = msgspec.structs.replace(finding, text=self._text(finding, entry.because))
            return [entry.finding]
        return []

    def _end(self, entry: _Open, number: int) -> Finding:
        return self._over(entry.finding, entry.because, number, entry.last_step, entry.all_lost_s)

    def _over(self, finding: Finding, because: str, number: int, last_step: int, all_lost_s: float) -> Finding:
        first_step = finding.since_step
        lost_s = all_lost_s / (last_step - first_step + 1)
        when = f"in step {last_step}" if last_step == first_step else f"a step, steps {first_step} to {last_step}"
        text = f"{self._people[finding.rank]} held the others up by {blame_words.duration(lost_s)} {when}: {because}"
        return msgspec.structs.replace(finding, step=number, lost_s=lost_s, over=True, text=text)

    def _stalls(self) -> tuple[Finding, ...]:
        """A step that took so long that it is told of at once, with whose it was, although it may be the only one."""
        step, usual_s = self._window[-1], self._measure.usual_step_s
        if self._measure.num_seen <= WINDOW or max(step.work_s) < _STALL * usual_s:
            return ()
        rank = max(range(len(self._people)), key=lambda each: step.work_s[each])
        lost_s = step.work_s[rank] - max([work_s for other, work_s in enumerate(step.work_s) if other != rank])
        parts: Mapping[Cause, float] = {
            "compute": step.compute_s[rank], "data": step.data_s[rank], "memory": step.redo_s[rank],
        }  # fmt: skip
        if lost_s < _STALL * usual_s or rank in self._open or step.number <= self._told[rank]:
            return ()
        cause = max(parts, key=lambda each: parts[each])
        if step.host_s[rank] >= _EXPLAINS * lost_s:
            cause = "host"
        elif parts[cause] < _EXPLAINS * lost_s:
            return ()
        self._told[rank] = step.number
        finding = Finding(step=step.number, rank=rank, cause=cause, since_step=step.number, lost_s=lost_s, text="")
        because = self._because(finding, ())
        finding = msgspec.structs.replace(finding, text=self._text(finding, because))
        return finding, self._over(finding, because, step.number, step.number, lost_s)

    def _text(self, finding: Finding, because: str) -> str:
        when = "in this step" if finding.since_step == finding.step else "a step"
        lost = blame_words.duration(finding.lost_s)
        return f"{self._people[finding.rank]} holds the others up by {lost} {when}: {because}"

    def _because(self, finding: Finding, links: Sequence[int]) -> str:
        assert self._seen is not None
        seen, step, rank = self._seen, self._window[-1], finding.rank
        words: Mapping[Cause, Callable[[], str]] = {
            "compute": lambda: blame_words.compute(seen, step, rank),
            "data": lambda: blame_words.data(seen, rank),
            "host": lambda: blame_words.host(seen, step, rank, links),
            "memory": lambda: blame_words.memory(seen, self._window, self._measure.ranks[rank], rank),
            "link": lambda: blame_words.link(seen, links, self._measure.ring.name(links)),
        }
        return words[finding.cause]()


class _Run(NamedTuple):
    """Steps in a row."""

    beyond_luck_s: float
    lost_s: float
    num_costly: int
    first: int
    last: int


def _costliest(counted: Sequence[tuple[int, float]], *, least_s: float, free_s: float, luck_s: float) -> _Run:
    """Return that run of steps of `counted` (number, seconds lost) that has cost most beyond luck.

    Args:
        least_s: seconds from which on a step is costly, as are the first and the last one of a run.
        free_s: what a step may cost, so that a run ends where there is little.
        luck_s: standard deviation of one step's.
    """
    best = _Run(0.0, 0.0, 0, 0, 0)
    for place, (first, first_s) in enumerate(counted):
        if first_s < least_s:
            continue
        total_s, num_costly = 0.0, 0
        for steps, (last, lost_s) in enumerate(counted[place:], start=1):
            total_s += lost_s
            num_costly += lost_s >= least_s
            beyond_s = total_s - free_s * steps - _LUCK * luck_s * steps**0.5
            if lost_s >= least_s and beyond_s > best.beyond_luck_s:
                best = _Run(beyond_s, total_s, num_costly, first, last)
    return best
