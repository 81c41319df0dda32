"""When each device was busy, waiting, communicating, reading data or stalled in the newest steps.

The one idea: all devices begin and end a step together, so a rank's step is its optimizer, reading, computing, waiting
and communicating, one after the other; what nobody measured stays empty.
"""

from collections.abc import Sequence
from typing import Any

from ragtag.watch.events import Step
from ragtag.watch.state import Roster
from ragtag.watch.totals import stalled_s

KINDS = ("busy", "waiting", "communicating", "data", "stalled")
_MOST_STEPS = 12
_MOST_SPANS = 1500
_MICRO = 6


def timeline(kept: Sequence[tuple[Step, Roster]]) -> dict[str, Any]:
    """Return the newest of `kept`, some steps that fit a screen, as plain numbers.

    `spans` are (device, kind, start, stop): places in `devices` and `kinds`, and seconds since the timeline began;
    `ends_s` is when each step ended.
    """
    ranks = max((len(roster) for _, roster in kept[-_MOST_STEPS:]), default=1)
    shown = kept[-min(_MOST_STEPS, max(2, _MOST_SPANS // (5 * ranks or 1))) :]
    names: dict[str, int] = {}
    for _, roster in reversed(shown):
        for device in roster:
            names.setdefault(device.member.name, len(names))
    spans: list[tuple[int, int, float, float]] = []
    ends_s: list[float] = []
    start_s = 0.0
    for step, roster in shown:
        for rank, device in enumerate(roster):
            at_s = start_s
            for kind, duration_s in pieces(step, rank):
                if duration_s > 0:
                    stop_s = min(at_s + duration_s, start_s + step.wall_s)
                    spans.append((names[device.member.name], kind, round(at_s, _MICRO), round(stop_s, _MICRO)))
                    at_s = stop_s
        start_s += step.wall_s
        ends_s.append(round(start_s, _MICRO))
    return {
        "kinds": KINDS,
        "devices": list(names),
        "duration_s": round(start_s, _MICRO),
        "first_step": shown[0][0].number if shown else 0,
        "last_step": shown[-1][0].number if shown else 0,
        "ends_s": ends_s,
        "spans": spans,
    }


def pieces(step: Step, rank: int) -> list[tuple[int, float]]:
    """Return kinds and durations of a rank's step, in the order they are drawn."""
    data_s, compute_s = _of(step.data_s, rank), _of(step.compute_s, rank)
    wait_s, apply_s = _of(step.wait_s, rank), _of(step.apply_s, rank)
    pieces = [(0, apply_s), (3, data_s), (0, compute_s), (1, wait_s), (2, step.comm_s)]
    if rank in step.stalled:
        return [(4, stalled_s(step, rank)), *pieces]
    too_long_s = sum(duration_s for _, duration_s in pieces) - step.wall_s
    if too_long_s > 0:  # clocks of two ranks: what is shown shorter is what nobody did
        pieces[3] = (1, wait_s - too_long_s)
    return pieces


def _of(column: Sequence[float], rank: int) -> float:
    return column[rank] if rank < len(column) else 0.0
