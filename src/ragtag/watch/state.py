"""What is known of a run after any number of its events: all that a view draws, in memory that has an end.

The one idea: the newest steps are kept whole, and what leaves them is added up in batches, by column, which is what
makes a million steps a matter of seconds. Devices are known by name, so they keep their totals whatever rank they have
and when they are gone.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import msgspec

from ragtag.watch.curve import Curve
from ragtag.watch.events import (
    AnyEvent,
    Began,
    Decided,
    Ended,
    Evaluated,
    Exchanged,
    Finding,
    Guarded,
    IslandChanged,
    Looped,
    Member,
    Members,
    Planned,
    Retuned,
    Said,
    Saved,
    Step,
    Verdict,
    Vitals,
    Worth,
)
from ragtag.watch.islands import IslandsState
from ragtag.watch.totals import Totals, sums

KEPT_STEPS = 64
"""At least so many of the newest steps are kept whole, at most twice as many."""
_KEPT_DEVICES = 200
_KEPT = 100
"""Of decisions, findings, messages and the like."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains has changed."""

    t: float
    step: int
    name: str
    host: str
    joined: bool
    reason: str = ""


@dataclass(slots=True)
class Device:
    """One that trains or has trained."""

    member: Member
    rank: int | None
    """None: it is gone."""
    since_step: int
    totals: Totals = field(default_factory=Totals)
    """Without the steps that are kept whole; `RunState.totals` has them all."""
    left_step: int = 0
    reason: str = ""
    """Why it left."""
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    temperature_c: float = 0.0
    clock_mhz: float = 0.0
    busy: float = 0.0
    """See `Vitals`."""
    worth: Worth | None = None
    worth_step: int = 0


Roster = tuple[Device, ...]


class RunState:
    """Call `apply` with each event of a log, in order.

    A step that comes again counts in place of the first one, if it is among those kept whole; a run that goes on from
    a checkpoint takes back what came after it. What was added up before stays: that time was spent.
    """

    def __init__(self) -> None:
        self.t = 0.0
        """When the newest event was written."""
        self.first: Began | None = None
        self.began: Began | None = None
        """The newest start."""
        self.last_step = 0
        """Where the script's loop ends; 0: not known."""
        self.members: Members | None = None
        self.plan: Planned | None = None
        self.evaluated: Evaluated | None = None
        self.saved: Saved | None = None
        self.ended: Ended | None = None
        """None: the run goes on, or its end is not in the log."""
        self.devices: dict[str, Device] = {}
        self.forgotten = 0
        """Devices that have left and are in `devices` no more."""
        self.decisions: dict[tuple[int, str], Decided] = {}
        self.findings: dict[tuple[str, str, int], Finding] = {}
        """By name, cause and first step."""
        self.changes: deque[Change] = deque(maxlen=_KEPT)
        self.messages: deque[Said] = deque(maxlen=_KEPT)
        self.loss, self.eta, self.evaluations = Curve(), Curve(), Curve()
        """Without the steps that are kept whole; see `curve`."""
        self.islands = IslandsState()
        """Sites that train side by side, as the hub that merges them has told."""
        self.roster: Roster = ()
        self._kept: dict[int, tuple[Step, Roster]] = {}
        self._newest = 0
        self._num_steps = self._num_eta = self._num_skipped = 0
        self._eta_sum = self._wall_s = 0.0
        self._samples = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Began: self._apply_began,
            Members: self._apply_members,
            Planned: self._apply_plan,
            Looped: self._apply_loop,
            Vitals: self._apply_vitals,
            Decided: self._apply_decision,
            Finding: self._apply_finding,
            Verdict: self._apply_verdict,
            Evaluated: self._apply_evaluation,
            Saved: self._apply_checkpoint,
            Said: self.messages.append,
            **dict.fromkeys((Exchanged, IslandChanged, Retuned, Guarded), self.islands.apply),
            Ended: self._apply_end,
        }

    def apply(self, event: AnyEvent) -> None:
        """Take an event into account."""
        if type(event) is not Step:
            self.t = event.t or self.t
            self._handlers[type(event)](event)
            return
        number = event.number
        kept = self._kept
        if number > self._newest and self.roster:
            kept[number] = (event, self.roster)
            self._newest = number
            if len(kept) == 2 * KEPT_STEPS:
                self._add_up()
        else:
            self._apply_odd_step(event)

    @property
    def step(self) -> Step | None:
        """The newest one."""
        return self._kept[self._newest][0] if self._newest in self._kept else None

    @property
    def num_steps(self) -> int:
        """Steps that are in the log."""
        return self._num_steps + len(self._kept)

    @property
    def num_skipped(self) -> int:
        """Steps whose gradient was not applied."""
        return self._num_skipped + sum(bool(step.skipped) for step in self.steps())

    @property
    def samples(self) -> int:
        """Of all steps in the log."""
        return self._samples + sum(step.samples for step in self.steps())

    @property
    def wall_s(self) -> float:
        """Seconds of all steps in the log."""
        return self._wall_s + sum(step.wall_s for step in self.steps())

    @property
    def mean_eta(self) -> float:
        """Over all steps where it was known; 0: nowhere."""
        known = [step.eta for step in self.steps() if step.eta]
        count = self._num_eta + len(known)
        return (self._eta_sum + sum(known)) / count if count else 0.0

    def steps(self, most: int = 2 * KEPT_STEPS) -> list[Step]:
        """Return the newest steps, whole, oldest first."""
        return [step for step, _ in islice(self._kept.values(), max(0, len(self._kept) - most), None)]

    def kept(self, most: int = 2 * KEPT_STEPS) -> list[tuple[Step, Roster]]:
        """Return the same with the devices that each was computed by, in rank order."""
        return list(islice(self._kept.values(), max(0, len(self._kept) - most), None))

    def totals(self) -> dict[str, Totals]:
        """Return what each device has done, all steps counted."""
        found = {}
        for name, device in self.devices.items():
            found[name] = totals = Totals()
            totals.add(device.totals)
        for roster, steps in _by_roster(self.kept()):
            for device, totals in zip(roster, sums(steps, len(roster))):
                if device.member.name in found:
                    found[device.member.name].add(totals)
        return found

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of "loss", "eta" or "evaluations", up to the newest step."""
        if name == "loss":
            return self.loss.drawn((step.number, step.loss) for step in self.steps())
        if name == "eta":
            return self.eta.drawn((step.number, step.eta or None) for step in self.steps())
        return self.evaluations.drawn()

    def _apply_odd_step(self, event: Step) -> None:
        """One that comes again, in place of one that was lost, or from ranks nobody has named."""
        number, kept = event.number, self._kept
        if not self.roster:
            ranks = tuple(Member(name=f"rank {rank}") for rank in range(len(event.shares)))
            self._apply_members(Members(step=number - 1, ranks=ranks))
        if kept and number < next(iter(kept)):
            if event.generation < kept[self._newest][0].generation:
                return  # a lost rank's last words, long counted
            self._rewind(number - 1)
        is_known = number in kept
        kept[number] = (event, self.roster)
        if number < self._newest and not is_known:
            self._kept = dict(sorted(kept.items()))
        self._newest = max(self._newest, number)

    def _add_up(self) -> None:
        """Add up the oldest of the kept steps."""
        oldest = list(islice(self._kept.values(), KEPT_STEPS))
        for roster, steps in _by_roster(oldest):
            for device, totals in zip(roster, sums(steps, len(roster))):
                device.totals.add(totals)
        steps = [step for step, _ in oldest]
        self.loss.extend([(step.number, step.loss) for step in steps])
        etas = [(step.number, step.eta) for step in steps if step.eta]
        self.eta.extend(etas)
        self._num_eta += len(etas)
        self._eta_sum += sum([eta for _, eta in etas])
        self._num_steps += len(steps)
        self._num_skipped += sum([1 for step in steps if step.skipped])
        self._wall_s += sum([step.wall_s for step in steps])
        self._samples += sum([step.samples for step in steps])
        for step in steps:
            del self._kept[step.number]

    def _rewind(self, step: int) -> None:
        """Take back what came after `step`."""
        for number in [number for number in self._kept if number > step]:
            del self._kept[number]
        for curve in (self.loss, self.eta, self.evaluations):
            curve.rewind(step)
        self._newest = next(reversed(self._kept), 0)

    def _apply_began(self, event: Began) -> None:
        if event.continued:
            self.first = self.first or event
            self.began = self.began or event
            return
        self._rewind(event.step)
        self._end_findings(event.step)
        self.began, self.ended = event, None
        self.first = self.first or event

    def _apply_members(self, event: Members) -> None:
        self.ended = None
        before, self.members = self.members, event
        if before is not None and msgspec.structs.replace(before, t=event.t) != event:  # else a new file begins with it
            self._end_findings(event.step)
        names = [member.name for member in event.ranks]
        reasons = {left.name: left.reason for left in event.left}
        for name, device in self.devices.items():
            if device.rank is not None and name not in names:
                device.rank, device.left_step, device.reason = None, event.step, reasons.get(name, "")
                self._tell(event, device.member, joined=False, reason=device.reason)
        for rank, member in enumerate(event.ranks):
            device = self.devices.get(member.name)
            if device is None or device.rank is None:
                if before is not None:
                    self._tell(event, member, joined=True)
                since = device.since_step if device is not None else event.step + 1
                totals = device.totals if device is not None else Totals()
                self.devices.pop(member.name, None)
                self.devices[member.name] = Device(member=member, rank=rank, since_step=since, totals=totals)
            else:
                device.member, device.rank = member, rank
        roster = tuple(self.devices[name] for name in names)
        if list(map(id, roster)) != list(map(id, self.roster)):
            self.roster = roster
        gone = [name for name, device in self.devices.items() if device.rank is None]
        for name in gone[: max(0, len(gone) - _KEPT_DEVICES)]:
            del self.devices[name]
            self.forgotten += 1

    def _tell(self, event: Members, member: Member, *, joined: bool, reason: str = "") -> None:
        self.changes.append(
            Change(t=event.t, step=event.step, name=member.name, host=member.host, joined=joined, reason=reason)
        )

    def _apply_plan(self, event: Planned) -> None:
        self.plan = event

    def _apply_loop(self, event: Looped) -> None:
        self.last_step, self.ended = event.last, None

    def _apply_vitals(self, event: Vitals) -> None:
        for name in ("memory_bytes", "peak_memory_bytes", "temperature_c", "clock_mhz", "busy"):
            for device, value in zip(self.roster, getattr(event, name)):
                setattr(device, name, value)

    def _apply_decision(self, event: Decided) -> None:
        self.decisions[(event.step, event.decided)] = event
        _bound(self.decisions)

    def _apply_finding(self, event: Finding) -> None:
        self.findings[(event.name, event.cause, event.since_step)] = event
        if len(self.findings) > _KEPT:
            over = [key for key, finding in self.findings.items() if finding.over]
            for key in over[: len(self.findings) - _KEPT]:
                del self.findings[key]
            _bound(self.findings, 2 * _KEPT)

    def _end_findings(self, step: int) -> None:
        """Whoever looked for them begins anew, with other ranks."""
        for key, finding in self.findings.items():
            if not finding.over:
                self.findings[key] = msgspec.structs.replace(finding, over=True, step=step)

    def _apply_verdict(self, event: Verdict) -> None:
        for worth in event.devices:
            if (device := self.devices.get(worth.name)) is not None:
                device.worth, device.worth_step = worth, event.step

    def _apply_evaluation(self, event: Evaluated) -> None:
        self.evaluated = event
        self.evaluations.extend([(event.step, event.value)])

    def _apply_checkpoint(self, event: Saved) -> None:
        self.saved = event

    def _apply_end(self, event: Ended) -> None:
        self.ended = event


def _by_roster(kept: Sequence[tuple[Step, Roster]]) -> list[tuple[Roster, list[Step]]]:
    groups = groupby(kept, key=lambda each: id(each[1]))
    return [(steps[0][1], [step for step, _ in steps]) for steps in (list(group) for _, group in groups)]


def _bound(kept: dict[Any, Any], most: int = _KEPT) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
