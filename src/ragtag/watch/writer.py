"""Writes a run's events, beside the training and never in its way.

The one idea: whoever has an event puts it into a queue of bounded length and goes on; one thread encodes and writes.
What does not fit is counted, and the count is written.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ragtag.watch.events import Event, Said

log = logging.getLogger("ragtag")

_EVERY_S = 0.5
_CAPACITY = 20_000
_TRY_AGAIN_S = 10.0


class Lines(Protocol):
    """Where lines go."""

    def append(self, lines: Sequence[bytes], /) -> None:
        """Write encoded lines, without line ends; what raises OSError is tried again later."""
        ...

    def close(self) -> None:
        """No more come."""
        ...


class LogWriter:
    """Takes events from any thread.

    Args:
        lines: where they are written; closed at the end.
        where: the same for people.
        capacity: most events that wait.
        every_s: seconds between two writes.
    """

    def __init__(
        self,
        lines: Lines,
        where: str,
        *,
        capacity: int = _CAPACITY,
        every_s: float = _EVERY_S,
    ) -> None:
        self._lines, self._where, self._capacity, self._every_s = lines, where, capacity, every_s
        self._waiting: deque[Event | tuple[float, Callable[[], Event | None]]] = deque()
        self._encoder = msgspec.json.Encoder()
        self._lost = 0
        self._refused_until_s = 0.0
        self._complained = False
        self._ending = threading.Event()
        self.cpu_s = 0.0
        """Processor seconds that the thread has used."""
        self._thread = threading.Thread(target=self._run, name="ragtag-log", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue it; never waits."""
        if len(self._waiting) >= self._capacity:
            self._lost += 1
            return
        self._waiting.append(msgspec.structs.replace(event, t=round(time.time(), 3)))

    def defer(self, make: Callable[[], Event | None]) -> None:
        """Queue an event that takes a while to work out; `make` is called on the log's own thread."""
        if len(self._waiting) < self._capacity:
            self._waiting.append((round(time.time(), 3), make))

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most that long."""
        self._ending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._write_waiting()
        self._refused_until_s = 0.0
        self._write_waiting()
        self._lines.close()

    def _write_waiting(self) -> None:
        if not self._waiting or time.monotonic() < self._refused_until_s:
            return
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        events = [event for each in waiting if (event := each if isinstance(each, Event) else _made(each)) is not None]
        if self._lost:
            lost, self._lost = self._lost, 0
            events.append(Said(t=time.time(), level="warning", text=f"{lost} events were too many to be written"))
        try:
            self._lines.append([self._encoder.encode(event) for event in events])
        except OSError as error:
            self._lost += len(events)
            self._refused_until_s = time.monotonic() + _TRY_AGAIN_S
            if not self._complained:
                log.warning("the run's log %s cannot be written: %s. Training goes on without it.", self._where, error)
            self._complained = True
        self.cpu_s = time.thread_time()


def _made(deferred: tuple[float, Callable[[], Event | None]]) -> Event | None:
    told_t, make = deferred
    event = make()
    return None if event is None else msgspec.structs.replace(event, t=told_t)
