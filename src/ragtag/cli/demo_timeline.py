"""When each device was busy, waiting or communicating, worked out from one rank's step reports.

The one idea: all devices hold the complete gradient at the same moment. From there backwards a device communicated,
before that it waited, before that it computed; what lies between that moment and the start of its next computing is
its optimizer step. Hence nothing but the reports is needed, and both trainings are read alike.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ragtag.cli.demo_training import Row

Kind = Literal["busy", "communicating", "waiting"]
KINDS: tuple[Kind, ...] = ("busy", "communicating", "waiting")


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One device doing one thing; seconds since the timeline's start."""

    device: int
    kind: Kind
    step: int
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.stop_s - self.start_s


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What the devices did for `duration_s` seconds."""

    duration_s: float
    spans: tuple[Span, ...]
    ends_s: tuple[float, ...]
    """When each step's gradient was complete."""

    def total_s(self, device: int, kind: Kind) -> float:
        """Return how long `device` did that, in seconds."""
        return sum(span.duration_s for span in self.spans if (span.device, span.kind) == (device, kind))

    def last(self, window_s: float) -> "Timeline":
        """Return the last `window_s` seconds; itself where it is not longer."""
        start_s = max(0.0, self.duration_s - window_s)
        spans = (
            msgspec.structs.replace(
                span, start_s=max(0.0, span.start_s - start_s), stop_s=max(0.0, span.stop_s - start_s)
            )
            for span in self.spans
        )
        return Timeline(
            duration_s=self.duration_s - start_s,
            spans=tuple(span for span in spans if span.stop_s > span.start_s),
            ends_s=tuple(end_s - start_s for end_s in self.ends_s if end_s > start_s),
        )


def timeline(rows: Sequence[Row]) -> Timeline:
    """Return what the devices did from the first of `rows` to the complete gradient of the last one.

    `Row.wall_s` and the order of times in it are rank 0's.
    """
    spans: list[Span] = []
    ends_s: list[float] = []
    step_start_s = 0.0
    for row in rows:
        end_s = step_start_s + row.compute_s[0] + row.wait_s[0] + row.comm_s
        for device, (compute_s, wait_s) in enumerate(zip(row.compute_s, row.wait_s)):
            before_s = ends_s[-1] if ends_s else 0.0
            begin_s = max(before_s, end_s - row.comm_s - wait_s - compute_s)
            computed_s = max(before_s, end_s - row.comm_s - wait_s)
            waited_s = max(before_s, end_s - row.comm_s)
            edges_s = (before_s if ends_s else begin_s, computed_s, waited_s, end_s)
            for kind, start_s, stop_s in zip(("busy", "waiting", "communicating"), edges_s, edges_s[1:]):
                if stop_s > start_s:
                    spans.append(Span(device=device, kind=kind, step=row.step, start_s=start_s, stop_s=stop_s))
        ends_s.append(end_s)
        step_start_s += row.wall_s
    return Timeline(duration_s=ends_s[-1] if ends_s else 0.0, spans=tuple(spans), ends_s=tuple(ends_s))
