"""Tells the event log what the run does: which step, in whose time, under which plan, at what efficiency.

The one idea: everything by rank comes with the votes, which every rank has, so one rank writes for all and asks nobody;
what takes longer than a few microseconds to work out is worked out on the log's own thread.
"""

import atexit
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from ragtag import __version__
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.group import Group
from ragtag.comm.judge import described
from ragtag.control.ballot import Ballot
from ragtag.control.controller import ACHIEVED_OVER
from ragtag.control.efficiency import eta
from ragtag.control.robust import median
from ragtag.control.worth import gains
from ragtag.core.config import Config
from ragtag.core.decision import Decision
from ragtag.core.sampler import Sampler
from ragtag.core.values import StepReport
from ragtag.runtime.blaming import Blaming
from ragtag.runtime.recording import NoRecorder, Recorder
from ragtag.runtime.run import Run
from ragtag.watch.events import (
    Began,
    Decided,
    Ended,
    Evaluated,
    Left,
    Looped,
    Member,
    Members,
    Planned,
    Said,
    Saved,
    Step,
    Verdict,
    Worth,
)
from ragtag.watch.log_file import LogFile
from ragtag.watch.writer import LogWriter

_REMEMBERED = 20
"""Steps from which a device's speed is taken where no controller knows it."""
_VERDICT_EVERY_S = 5.0
_FIRST_VERDICT = 10
"""Step."""
_LOOKED_AT = 8
"""Newest decisions that are looked at in each step."""
_FRAME_BYTES = 256 << 10


class HubLines:
    """The log of a run whose first rank may be on any machine, and change: its hub writes it."""

    def __init__(self, group: ElasticGroup) -> None:
        self._group = group

    def append(self, lines: Sequence[bytes]) -> None:
        """Send the lines, some at a time."""
        batch, num_bytes = [], 0
        for line in lines:
            if batch and num_bytes + len(line) > _FRAME_BYTES:
                self._group.send_lines(batch)
                batch, num_bytes = [], 0
            batch.append(line)
            num_bytes += len(line)
        if batch:
            self._group.send_lines(batch)

    def close(self) -> None:
        """The group closes its connection itself."""


def recorder(config: Config, group: Group, devices: Sequence[tuple[str, str, str]]) -> Recorder:
    """Return who writes the log as `config` and the launcher say.

    Args:
        config: the run's; its `log` names a file, unless the run has a hub, which has one.
        group: the ranks.
        devices: names and hosts of emulated devices, by rank or, in a run with a hub, by the number in a worker's name;
            empty: none are emulated.
    """
    if isinstance(group, ElasticGroup):
        return EventRecorder(LogWriter(HubLines(group), "at the hub"), group, devices)
    if config.log is None or group.rank != 0:
        return NoRecorder()
    return EventRecorder(LogWriter(LogFile(Path(config.log)), config.log), group, devices)


class EventRecorder:
    """Writes events while this rank is the first."""

    def __init__(self, writer: LogWriter, group: Group, devices: Sequence[tuple[str, str, str]]) -> None:
        self._writer, self._group, self._devices = writer, group, devices
        self._began: Began | None = None
        self._members: Members | None = None
        self._plan_id = ""
        self._told_decisions: dict[tuple[int, str], bool] = {}
        """Whether with what they achieved."""
        self._sample_s: list[deque[float]] = []
        self._verdict_due_s = 0.0
        self._blaming: Blaming | None = None
        self._said = Listener(self)
        self._run: Run | None = None
        self._last_step = 0
        self._has_ended = False
        logging.getLogger("ragtag").addFilter(self._said)
        # After the script and before the group says goodbye, whose handler was registered earlier.
        atexit.register(self._script_ended)

    @property
    def _writes(self) -> bool:
        return self._group.rank == 0

    def began(self, run: Run, script: str) -> None:
        """Remember what the log begins with; it is written with the first event."""
        self._run = run
        trained = sum(p.numel() for group in run.optimizer.param_groups for p in group["params"])
        self._began = Began(
            run=os.environ.get("RAGTAG_RUN", ""),
            script=script,
            version=__version__,
            torch=str(torch.__version__),
            step=run.committed,
            global_batch_size=run.sampler.global_batch_size,
            parameters=trained,
            settings=msgspec.to_builtins(msgspec.structs.replace(run.config, blocks=None)),  # a function is no word
        )
        self._told_decisions = {(each.step, each.kind): True for each in run.decisions[-_LOOKED_AT:]}
        if self._writes and not (isinstance(self._group, ElasticGroup) and self._group.is_newcomer):
            self._writer.write(self._began)
            self._tell_members(run)

    def looped(self, run: Run, last: int) -> None:
        """The script has called `steps`."""
        if self._writes:
            self._tell_members(run)
            self._writer.write(Looped(step=run.committed, last=last))

    def step(self, run: Run, settling: Any, report: StepReport) -> None:
        """A step was committed."""
        if not self._writes:
            return
        self._tell_members(run)
        self._last_step = report.number
        ballots = settling.ballots
        self._writer.defer(partial(_step_of, report, ballots, self._sample_seconds(run, report), run.sampler))
        self._tell_decisions(run)
        if self._blaming is not None:
            self._blaming.step(run, report.number, ballots)
        now_s = time.monotonic()
        if run.controller is not None and report.number >= _FIRST_VERDICT and now_s >= self._verdict_due_s:
            self._verdict_due_s = now_s + _VERDICT_EVERY_S
            self._writer.defer(self._verdict(run, report.number))

    def _sample_seconds(self, run: Run, report: StepReport) -> list[float]:
        """Seconds a sample of each device, as far as they are known."""
        if run.controller is not None:
            return [speed.level_s for speed in run.controller.speeds]
        if len(self._sample_s) != len(report.shares):
            self._sample_s = [deque(maxlen=_REMEMBERED) for _ in report.shares]
        samples_of: Sequence[float] = report.shares
        if (pipe := run.pipe) is not None:  # whole samples that each stage's time would have been enough for
            samples_of = [report.shares[feeding] * part for feeding, part in zip(pipe.feeding_ranks, pipe.parts)]
        for known, samples, seconds in zip(self._sample_s, samples_of, report.compute_s):
            if samples and seconds > 0:
                known.append(seconds / samples)
        return [median(tuple(known)) if known else 0.0 for known in self._sample_s]

    def _verdict(self, run: Run, step: int) -> Callable[[], Verdict | None]:
        assert run.controller is not None
        cluster, plan, limits = run.controller.cluster, run.controller.plan, run.controller.limits
        members = () if self._members is None else self._members.ranks

        def worked_out() -> Verdict | None:
            found = gains(cluster, plan, limits)
            if not found or len(found) != len(members):
                return None
            devices = [
                Worth(rank=rank, name=member.name, gain=round(each.gain, 5), text=each.text)
                for rank, (member, each) in enumerate(zip(members, found))
            ]
            return Verdict(step=step, devices=tuple(devices))

        return worked_out

    def _tell_decisions(self, run: Run, *, at_end: bool = False) -> None:
        """New ones, and each once more when it was seen what it achieved, or no more is to be seen."""
        newest = run.newest_decisions(_LOOKED_AT)
        for decision in newest:
            key = (decision.step, decision.kind)
            is_new = key not in self._told_decisions
            least = ACHIEVED_OVER if decision is newest[-1] and not at_end else 1
            complete = decision.achieved_over >= least
            if is_new or (complete and not self._told_decisions[key]):
                self._told_decisions[key] = complete
                self._writer.write(_decided(decision))
        while len(self._told_decisions) > 2 * _LOOKED_AT:
            del self._told_decisions[next(iter(self._told_decisions))]

    def _tell_members(self, run: Run) -> None:
        group, before = self._group, self._members
        if before is None or before.generation != run.generation or len(before.ranks) != group.world_size:
            ranks = self._ranks(run)
            why = group.go.reason if isinstance(group, ElasticGroup) and group.go is not None else ""
            names, old = [member.name for member in ranks], [] if before is None else [m.name for m in before.ranks]
            self._members = Members(
                step=run.committed,
                generation=run.generation,
                ranks=ranks,
                joined=tuple(name for name in names if before is not None and name not in old),
                left=tuple(
                    Left(name=member.name, host=member.host, reason=why)
                    for member in (() if before is None else before.ranks)
                    if member.name not in names
                ),
            )
            self._writer.write(self._members)
            self._sample_s, self._plan_id = [], ""
            if self._blaming is not None:
                self._blaming.flush()
            self._blaming = Blaming(self._writer, ranks, [member.model for member in ranks])
        if run.plan_id != self._plan_id:
            self._plan_id, plan = run.plan_id, run.plan
            self._writer.write(
                Planned(
                    step=run.committed,
                    id=run.plan_id,
                    shares=plan.shares,
                    micro_batch=plan.micro_batch,
                    unit=plan.unit,
                    pulled=plan.pulled,
                    reason=plan.reason,
                    predicted_step_s=0.0 if run.controller is None else _micro(run.controller.predicted_step_s),
                )
            )

    def _ranks(self, run: Run) -> tuple[Member, ...]:
        group = self._group
        if isinstance(group, ElasticGroup) and group.go is not None:
            members = [(member.name, member.host) for member in group.go.members]
        else:
            numbers = [sum(host == other for other in group.hosts[:rank]) for rank, host in enumerate(group.hosts)]
            members = [(f"{host}/{number}", host) for host, number in zip(group.hosts, numbers)]
        ranks = []
        for rank, (name, host) in enumerate(members):
            number = name.rpartition("/")[2]
            index = int(number) if isinstance(group, ElasticGroup) and number.isdigit() else rank
            if index < len(self._devices):
                name, host, kind = self._devices[index]
            else:
                kind = run.device_kinds[rank] if rank < len(run.device_kinds) else ""
            ranks.append(Member(name=name, host=host, model=kind))
        return tuple(ranks)

    def evaluated(self, step: int, value: float, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""
        if self._writes:
            rounded = {name: _finite(number) for name, number in metrics.items()}
            self._writer.write(Evaluated(step=step, value=_finite(value), metrics=rounded))

    def saved(self, step: int, path: str, took_s: float) -> None:
        """A checkpoint is complete."""
        if self._writes:
            self._writer.write(Saved(step=step, path=path, took_s=_micro(took_s)))

    def said(self, level: str, text: str) -> None:
        """A line of the `ragtag` logger."""
        if self._writes:
            self._writer.write(Said(level="warning" if level == "warning" else "info", text=text))

    def ended(self, step: int, reason: str) -> None:
        """The run ends."""
        if self._writes and not self._has_ended:
            self._has_ended = True
            if self._blaming is not None:
                self._blaming.flush()
            if self._run is not None:
                self._tell_decisions(self._run, at_end=True)
            self._writer.write(Ended(step=step, reason=reason))

    def _script_ended(self) -> None:
        error = getattr(sys, "last_value", None)  # set where an exception has ended the script
        self.ended(self._last_step, "" if error is None else described(error))
        self.close()

    def close(self) -> None:
        """Write what is left."""
        atexit.unregister(self._script_ended)
        logging.getLogger("ragtag").removeFilter(self._said)
        self._writer.close()


class Listener(logging.Filter):
    """Hears what ragtag says, and lets everything pass: with a handler in its place Python would no longer print
    warnings of scripts that set up no logging."""

    def __init__(self, to: EventRecorder) -> None:
        super().__init__()
        self._to = to

    def filter(self, record: logging.LogRecord) -> bool:
        """One line."""
        self._to.said("warning" if record.levelno >= logging.WARNING else "info", record.getMessage())
        return True


def _step_of(report: StepReport, ballots: Sequence[Ballot], sample_s: Sequence[float], sampler: Sampler) -> Step:
    """The event of a step.

    Args:
        sample_s: seconds a sample of each device, as far as they are known.
    """
    return Step(
        number=report.number,
        loss=_finite(report.loss),
        metrics={name: _finite(value) for name, value in report.metrics.items()},
        grad_norm=None if report.grad_norm is None else _finite(report.grad_norm),
        lr=_finite(report.lr),
        samples=report.samples,
        weight=report.weight,
        skipped=report.skipped,
        wall_s=_micro(report.wall_s),
        predicted_s=_micro(report.predicted_s),
        eta=round(eta(report.samples, report.wall_s, sample_s), 5),
        shares=report.shares,
        compute_s=_micros(report.compute_s),
        data_s=_micros([ballot.data_s for ballot in ballots]),
        wait_s=_micros([max(0.0, wait - b.data_s) for wait, b in zip(report.wait_s, ballots)]),
        apply_s=_micros([ballot.apply_s for ballot in ballots]),
        comm_s=_micro(report.comm_s),
        sent_bytes=report.sent_bytes,
        stalled=tuple([rank for rank, ballot in enumerate(ballots) if ballot.absent]),
        plan=report.plan_id,
        generation=report.generation,
        epoch=sampler.batch(report.number).epoch,
    )


def _decided(decision: Decision) -> Decided:
    return Decided(
        step=decision.step,
        decided=decision.kind,
        reason=decision.reason,
        predicted_gain=round(decision.predicted_gain, 5),
        predicted_step_s=_micro(decision.predicted_step_s),
        achieved_step_s=None if decision.achieved_step_s is None else _micro(decision.achieved_step_s),
        achieved_over=decision.achieved_over,
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _micro(seconds: float) -> float:
    return round(seconds, 6)


def _micros(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple([round(each, 6) for each in seconds])
