"""One turn of the hub: the state as it changes, and the effects so far, in order.

The one idea: a turn lives only inside one call of `rules.advance`, which is pure from outside; inside, the rules read
as what the hub does, one line after another.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from ragtag.hub.frames import End, FromHub
from ragtag.hub.rules_limits import cut
from ragtag.hub.rules_state import (
    CloseConnection,
    Effect,
    EndRecord,
    HubState,
    Journal,
    JournalRecord,
    Log,
    Send,
    Worker,
)


@dataclass
class Turn:
    """Changes while one event is dealt with."""

    state: HubState
    now_s: float
    effects: list[Effect] = field(default_factory=list)

    def set(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **changes)

    def set_worker(self, inc: str, **changes: Any) -> None:
        """Replace fields of a known worker."""
        self.set(
            workers=tuple(
                replace(worker, **changes) if worker.member.inc == inc else worker for worker in self.state.workers
            )
        )

    def forget(self, inc: str) -> None:
        """Drop a worker."""
        self.set(workers=tuple(worker for worker in self.state.workers if worker.member.inc != inc))

    def suspect(self, inc: str, why: str) -> None:
        """Do not count on this worker any more."""
        self.set_worker(inc, suspicion=cut(why))
        self.log(why, "warning")

    def send(self, inc: str, frame: FromHub) -> None:
        """Send a frame, if that worker is connected."""
        worker = self.state.worker(inc)
        if worker is not None and worker.connected:
            self.effects.append(Send(inc=inc, frame=frame))

    def close(self, inc: str, reason: str) -> None:
        """End a connection."""
        self.effects.append(CloseConnection(inc=inc, reason=reason))

    def journal(self, record: JournalRecord) -> None:
        """Write a record down before anything that follows."""
        self.effects.append(Journal(record=record))

    def log(self, text: str, level: Literal["debug", "info", "warning"] = "info") -> None:
        """Tell people."""
        self.effects.append(Log(text=cut(text), level=level))

    def end(self, reason: str, *, origin: str = "", failed: bool = True, told: bool = False) -> None:
        """End the run everywhere. `told`: a worker's own terminal shows why."""
        end = End(reason=cut(reason), origin=origin, failed=failed)
        self.journal(EndRecord(end=end))
        self.set(end=end, preparing=None)
        self.log(f"the run is over: {end.reason}", "debug" if told else "warning" if failed else "info")
        for worker in self.state.workers:
            self.send(worker.inc, end)

    def worker(self, inc: str) -> Worker:
        """A worker that is known for sure."""
        worker = self.state.worker(inc)
        assert worker is not None, inc
        return worker
