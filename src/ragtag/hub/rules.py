"""The hub as one pure function: who is in the run, generation by generation (docs/membership.md).

The one idea: `advance` takes all the hub knows, one event and the time, and returns what it knows now and what to do,
in order. A record to be journalled always stands before the frames that make it visible.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ragtag.core.errors import LaunchError
from ragtag.hub.rules_forming import announce, go_on
from ragtag.hub.rules_frames import receive
from ragtag.hub.rules_state import (
    Closed,
    DescribedRecord,
    Effect,
    EndRecord,
    EpochRecord,
    Event,
    GoRecord,
    HubState,
    JournalRecord,
    PointerRecord,
    ReadyRecord,
    Received,
    Restarted,
    RunRecord,
    RunSettings,
    Worker,
)
from ragtag.hub.rules_suspicion import suspicions
from ragtag.hub.rules_turn import Turn


def advance(state: HubState, event: Event, now_s: float) -> tuple[HubState, tuple[Effect, ...]]:
    """Return the hub's next state and what it does, in this order, each done before the next.

    Events: `Restarted` is the first of every process (a new run's too), done before the port is opened; then
    `Received`, `Closed` and `Tick` as they come. Frames that are stale, foreign or absurd change nothing.

    Args:
        state: from `restore` or from the last call.
        event: what happened.
        now_s: any clock that only moves on, in seconds; the same for all calls of one process.
    """
    turn = Turn(state, now_s)
    if isinstance(event, Restarted):
        _restart(turn)
    elif isinstance(event, Received):
        receive(turn, event.inc, event.frame)
    elif isinstance(event, Closed):
        _closed(turn, event)
    elif state.end is None:
        for inc, why in suspicions(state, now_s):
            turn.suspect(inc, why)
    go_on(turn)
    return turn.state, tuple(turn.effects)


def restore(records: Sequence[JournalRecord], settings: RunSettings) -> HubState:
    """Return what a journal tells, in order; no records: a new run. `Restarted` must follow.

    Raises:
        LaunchError: the journal is another run's, or its entries are in no order that a hub writes.
    """
    state = HubState(settings=settings)
    for number, record in enumerate(records, 1):
        if isinstance(record, RunRecord) == (number > 1):
            raise LaunchError(f"Entry {number} of the hub's journal is {record!r}, which no hub writes there.")
        if isinstance(record, RunRecord):
            if record.run != settings.run:
                raise LaunchError(
                    f"This hub was started for run {settings.run!r}, but its journal is that of run {record.run!r}. "
                    f"Give another run directory, or that run's name."
                )
            state = replace(state, known=True)
        elif isinstance(record, EpochRecord):
            state = replace(state, epoch=record.epoch)
        elif isinstance(record, DescribedRecord):
            state = replace(state, description=record.description)
        elif isinstance(record, GoRecord):
            state = replace(state, go=record.go, started=state.started or record.go.num_veterans > 0)
        elif isinstance(record, ReadyRecord):
            state = replace(state, started=True)
        elif isinstance(record, PointerRecord):
            state = replace(state, checkpoint_step=record.step, checkpoint=record.name)
        elif isinstance(record, EndRecord):
            state = replace(state, end=record.end)
    return state


def _restart(turn: Turn) -> None:
    """What members said before is forgotten; all of them are asked again, under numbers never used before."""
    state = turn.state
    if not state.known:
        turn.journal(RunRecord(run=state.settings.run, version=state.settings.version))
    epoch = next_epoch(state)
    turn.journal(EpochRecord(epoch=epoch))
    members = () if state.go is None else state.go.members
    workers = tuple(Worker(member=member, connected=False, heard_s=turn.now_s) for member in members)
    turn.set(known=True, epoch=epoch, counter=0, workers=workers, arrived_s=turn.now_s)
    if state.go is not None and state.end is None:
        announce(turn, "the hub was restarted")


def next_epoch(state: HubState) -> int:
    """Never used before, so that no generation's number is ever used twice."""
    return state.epoch + 1


def _closed(turn: Turn, event: Closed) -> None:
    worker = turn.state.worker(event.inc)
    if worker is None or not worker.connected:
        return
    if event.inc not in turn.state.members:
        turn.forget(event.inc)
        return
    turn.set_worker(event.inc, connected=False)
    preparing = turn.state.preparing
    if preparing is not None:
        # A generation never begins with a member that is not connected: its end would go unnoticed.
        joins = tuple(join for join in preparing.joins if join.inc != event.inc)
        turn.set(preparing=replace(preparing, joins=joins))
    hopeful = preparing is not None and preparing.last_chance
    if turn.state.end is None and not (worker.left or worker.suspicion or hopeful):
        turn.suspect(event.inc, f"{worker.title} is gone: {event.reason}")


__all__ = ["advance", "restore"]
