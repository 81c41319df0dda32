"""How far a run is, on the terminal of whoever started it: a bar with the time left, or a line now and then.

The one idea: the launcher reads the run's own log, like every other view, so it does not matter which rank on which
machine is the first, and training never waits for a terminal.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ragtag.watch.reader import Follower
from ragtag.watch.state import RunState

_LINE_EVERY_S = 10.0
_LOOK_EVERY_S = 0.5
_RECENT = 50
_BAR = 24


class Console:
    """Call `update` often, and `close` at the end.

    Args:
        log: the run's event log; it need not be there yet.
        stream: where to write.
        line_every_s: seconds between two lines where `stream` is no terminal.
        clock: seconds that only ever grow.
    """

    def __init__(
        self,
        log: Path,
        stream: TextIO | None = None,
        *,
        line_every_s: float = _LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._follower, self._state = Follower(log), RunState()
        self._clock, self._line_every_s = clock, line_every_s
        self._look_at_s = 0.0
        self._line_at_s = clock() + line_every_s
        self._said_step = 0
        self._status = StatusLine(self._stream) if is_terminal(self._stream) else None

    def update(self) -> None:
        """Look at the log, if it is time to, and show what has changed."""
        now_s = self._clock()
        if now_s < self._look_at_s or (self._status is None and now_s < self._line_at_s):
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        for event in self._follower.new():
            self._state.apply(event)
        step = self._state.step
        if step is None:
            return
        if self._status is not None:
            self._status.show(progress(self._state, bar=True))
        elif step.number != self._said_step:
            self._said_step, self._line_at_s = step.number, now_s + self._line_every_s
            _write(self._stream, f"ragtag: {progress(self._state)}\n")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._status is not None:
            self._status.close()


def progress(state: RunState, *, bar: bool = False) -> str:
    """Return "step 120 of 1,000  loss 2.31  412 samples/s  eta 97 %  3:20 left", with a bar in front if it is asked for
    and the end is known."""
    step = state.step
    assert step is not None, "no step is known yet"
    recent = state.steps(_RECENT)
    recent_s = sum(each.wall_s for each in recent)
    last = state.last_step if state.last_step >= step.number else 0
    parts = [f"step {step.number:,} of {last:,}" if last else f"step {step.number:,}"]
    parts.append("loss -" if step.loss is None else f"loss {step.loss:.4g}")
    if recent_s:
        parts.append(f"{sum(each.samples for each in recent) / recent_s:,.4g} samples/s")
    if step.eta:
        parts.append(f"eta {100 * step.eta:.0f} %")
    if last and recent:
        parts.append(f"{clock_time((last - step.number) * recent_s / len(recent))} left")
    if bar and last:
        filled = _BAR * step.number // last
        parts.insert(0, f"[{'#' * filled}{'.' * (_BAR - filled)}] {100 * step.number // last:3d} %")
    return "  ".join(parts)


def clock_time(seconds: float) -> str:
    """Return "3:20" or "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class StatusLine:
    """The last line of a terminal, kept for us while everything else scrolls above it, whoever writes it.

    Done with the terminal's scrolling region (DECSTBM of the VT100), so workers may write to the terminal by
    themselves.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows = 0

    def show(self, text: str) -> None:
        """Show `text`, cut to the terminal's width."""
        columns, rows = shutil.get_terminal_size()
        if rows < 3:
            return
        if rows != self._rows:
            # A new line first, so that what stands in the last one scrolls up; save, set the region, go back.
            _write(self._stream, f"\n\0337\033[1;{rows - 1}r\0338\033[1A")
            self._rows = rows
        _write(self._stream, f"\0337\033[{rows};1H\033[K{text[: columns - 1]}\0338")

    def close(self) -> None:
        """Give the line back."""
        if self._rows:
            _write(self._stream, f"\0337\033[r\033[{self._rows};1H\033[K\0338")
            self._rows = 0


def is_terminal(stream: TextIO) -> bool:
    """Whether it is one that moves its cursor when told to."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except ValueError:
        return False


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass  # nobody looks any more
