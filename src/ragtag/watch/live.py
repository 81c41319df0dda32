"""A log that is followed for viewers: its run's drawable state, cut into sections that are sent when they change.

The one idea: a section is encoded once for all viewers, and each viewer is sent those that differ from what it has; so
a viewer that was slow skips what it has missed, and nothing is kept for it.
"""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ragtag.watch.drawable import drawable
from ragtag.watch.reader import Follower
from ragtag.watch.state import RunState

_READ_BYTES = 4 << 20
_MANY = 100
"""Fewer events than that are what a run has written just now."""
_BLOCK = 100
"""Points of a curve in a section: of a long curve only the last section changes."""

Sections = Mapping[str, bytes]


class Live:
    """Call `refresh` now and then, then look at `sections`.

    Args:
        path: the log, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sections: Sections = {}
        """JSON by name; replaced, never changed."""
        self.drawn: dict[str, Any] = {}
        self._follower = Follower(path)
        self._state = RunState()
        self._written_t = 0.0
        self._lock = threading.Lock()

    def refresh(self, most_s: float = 60.0) -> bool:
        """Read on for about that long; return whether the log's end was reached."""
        with self._lock:
            return self._refresh(time.monotonic() + most_s)

    def quiet_s(self) -> float | None:
        """Seconds since the log was last written to; None: it is not there."""
        return max(0.0, time.time() - self._written_t) if self._written_t else None

    def _refresh(self, until_s: float) -> bool:
        is_new, is_at_end = False, False
        while not is_at_end and (not is_new or time.monotonic() < until_s):
            events = self._follower.new(_READ_BYTES)
            for event in events:
                self._state.apply(event)
            is_new, is_at_end = is_new or bool(events), len(events) < _MANY
        written_t = _written_t(self.path)
        if is_new or written_t != self._written_t or not self.sections:
            self._written_t = written_t
            decoder = self._follower.decoder
            self.drawn = drawable(self._state)
            self.drawn["log"] = {
                "path": str(self.path),
                "written_t": written_t or None,
                "skipped_lines": decoder.skipped,
                "unknown_lines": decoder.unknown,
            }
            self.sections = sections(self.drawn)
        return is_at_end


def sections(drawn: Mapping[str, Any]) -> Sections:
    """Return JSON by name; of a curve, `NAME.blocks` says how many of `NAME.0`, `NAME.1`, ... there are."""
    found = {name: msgspec.json.encode(value) for name, value in drawn.items() if name != "curves"}
    for name, curve in drawn["curves"].items():
        points = list(zip(curve["steps"], curve["values"]))
        blocks = [points[first : first + _BLOCK] for first in range(0, len(points), _BLOCK)]
        found[f"curves.{name}.blocks"] = msgspec.json.encode(len(blocks))
        for number, block in enumerate(blocks):
            found[f"curves.{name}.{number}"] = msgspec.json.encode(block)
    return found


def message(new: Sections, old: Sections) -> bytes:
    """Return a server-sent event with what is in `new` and not in `old`, and with the time here."""
    changed = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in new.items() if old.get(name) != value)
    return b'data: {"server_t":%.3f,"sections":{%s}}\n\n' % (time.time(), changed)


def _written_t(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
