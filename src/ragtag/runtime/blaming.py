"""Puts into the event log who holds the others up, and how the devices are.

The one idea: findings are worked out on the log's own thread, in the order of the steps, from votes that never change;
some steps at a time, so that those in which nothing can be found cost next to nothing.
"""

import logging
import time
from collections.abc import Sequence

from ragtag.control.ballot import Ballot
from ragtag.control.blame import Blame, Finding, seen_of
from ragtag.control.blame_calm import Sieve
from ragtag.core.values import Plan
from ragtag.runtime.run import Run
from ragtag.runtime.vitals import EVERY_S
from ragtag.watch import events
from ragtag.watch.writer import LogWriter

log = logging.getLogger("ragtag")

_TOGETHER, _MOST_S = 4, 0.5
"""Steps that are looked at together, and seconds that the first of them waits at most for the others."""
_Shown = tuple[Sequence[Ballot], Plan, Sequence[tuple[float, float]]]


class Blaming:
    """Of the ranks of one generation.

    Args:
        writer: of the log.
        members: the ranks.
        kinds: by rank; equal where devices are expected to be equally fast.
    """

    def __init__(self, writer: LogWriter, members: Sequence[events.Member], kinds: Sequence[str]) -> None:
        self._writer, self._members = writer, tuple(members)
        self._blame = Blame([each.name for each in members], [each.host for each in members], kinds)
        self._sieve = Sieve(self._blame)
        self._vitals_due_s = time.monotonic() + EVERY_S
        self._failed = False
        self._waiting: list[_Shown] = []
        self._waiting_since_s = 0.0

    def step(self, run: Run, number: int, ballots: Sequence[Ballot]) -> None:
        """Step `number` was committed with these votes."""
        if len(ballots) != len(self._members):
            return  # of another generation
        now_s = time.monotonic()
        if now_s >= self._vitals_due_s:
            self._vitals_due_s = now_s + EVERY_S
            self._writer.write(vitals_of(number, ballots))
        if len(ballots) > 1:
            plan, speeds = run.plan, () if run.controller is None else run.controller.speeds
            fixed = [(speed.fixed.per_step, speed.fixed.per_forward) for speed in speeds]
            if not self._waiting:
                self._waiting_since_s = now_s
            self._waiting.append((ballots, plan, fixed))
            if len(self._waiting) >= _TOGETHER or now_s - self._waiting_since_s >= _MOST_S:
                self.flush()

    def flush(self) -> None:
        """Look at what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._writer.defer(lambda: self._observe(waiting))

    def _observe(self, steps: Sequence[_Shown]) -> None:
        if self._failed:
            return
        try:
            looked_at = [steps[index] for index in self._sieve.worth_showing([ballots for ballots, *_ in steps])]
            findings = [
                finding
                for ballots, plan, fixed in looked_at
                for finding in self._blame.observe(seen_of(ballots, plan, fixed=fixed))
            ]
        except Exception:  # the log is worth more than what this adds to it
            self._failed = True
            log.exception("nothing is said any more about who holds the others up, because of a fault in ragtag")
            return
        for finding in findings:
            self._writer.write(self._event(finding))

    def _event(self, finding: Finding) -> events.Finding:
        member = self._members[finding.rank]
        return events.Finding(
            step=finding.step,
            rank=finding.rank,
            name=member.name,
            host=member.host,
            cause=finding.cause,
            since_step=finding.since_step,
            lost_s=round(finding.lost_s, 6),
            text=finding.text,
            over=finding.over,
        )


def vitals_of(step: int, ballots: Sequence[Ballot]) -> events.Vitals:
    """Return how the devices are; a number that is known of nobody is left out."""

    def known(values: Sequence[float]) -> tuple[float, ...]:
        return tuple([round(value, 3) for value in values]) if any(values) else ()

    def bytes_known(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) if any(values) else ()

    return events.Vitals(
        step=step,
        memory_bytes=bytes_known([ballot.memory_bytes for ballot in ballots]),
        peak_memory_bytes=bytes_known([ballot.peak_memory_bytes for ballot in ballots]),
        temperature_c=known([ballot.temperature_c for ballot in ballots]),
        clock_mhz=known([ballot.clock_mhz for ballot in ballots]),
        busy=known([ballot.busy for ballot in ballots]),
    )
