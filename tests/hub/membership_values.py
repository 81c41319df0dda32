"""The values of the model in `membership_model`: budgets, processes, collectives, and a state of everything.

The one idea: what people read and what only a clock sets is wiped from the hub's state, so that states that lead to the
same are the same.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from ragtag.hub.frames import End, Go, Prep, Started
from ragtag.hub.rules_state import (
    EndRecord,
    EpochRecord,
    GoRecord,
    HubState,
    Journal,
    PointerRecord,
    ReadyRecord,
    RunRecord,
    RunSettings,
    Send,
)
from ragtag.hub.worker_rules import WorkerState

PATIENCE_S = 30.0
LONG_AGO_S = -1e6
CLOSED = "closed"
SETTINGS = RunSettings(run="r", version="0", patience_s=PATIENCE_S)


class Violation(Exception):
    """An invariant does not hold."""


class Bounds(NamedTuple):
    """Size of the world, and what the adversary may do how often."""

    workers: int
    newcomers: int = 0
    steps: int = 2
    crash: int = 0
    suspect: int = 0
    """Living members that are judged silent, or late."""
    glitch: int = 0
    """Collectives that fail though everybody lives."""
    cut: int = 0
    """Connections to the hub that break though both ends live."""
    hub: int = 0
    rejoin: int = 0
    checkpoint: int = 0
    cold: bool = False
    """Begin before the first generation, not in it."""


class Weak(NamedTuple):
    """What is done wrong outside the rules' own functions."""

    journal_last: bool = False
    votes_early: bool = False
    """It votes without waiting until the hub has written down that the state exists."""
    applies_alone: bool = False
    """It applies what it holds, before others have voted."""


FAITHFUL = Weak()


class World(NamedTuple):
    """Budgets, and what the invariants need to remember."""

    crash: int
    suspect: int
    glitch: int
    cut: int
    hub: int
    rejoin: int
    checkpoint: int
    newcomers: int
    log: tuple[tuple[str, int], ...] = ()
    """(digest, generation) by step, as first applied by anybody."""


class Process(NamedTuple):
    """One worker's process."""

    me: WorkerState
    alive: bool = True
    linked: bool = True
    cover: int = 0
    """Units in its own sum."""
    history: tuple[str, ...] = ()
    """Digests applied: what its parameters are."""


class Group(NamedTuple):
    """One generation's collectives; tuples are by rank, those of steps by step - 1."""

    generation: int
    members: tuple[str, ...]
    num_veterans: int
    base: int
    posted: tuple[int | None, ...]
    source: tuple[str, ...] | None
    """What rank 0 gives to newcomers."""
    copied: tuple[bool, ...]
    sums: tuple[tuple[tuple[int, bool] | None, ...], ...]
    """(units, whether a soft generation waits) of each rank's contribution."""
    votes: tuple[tuple[str, ...], ...]


class Node(NamedTuple):
    """A state of everything, unpacked."""

    hub: HubState
    journal: tuple
    world: World
    groups: tuple[Group, ...]
    processes: tuple[Process | None, ...]
    up: tuple[tuple, ...]
    down: tuple[tuple, ...]


Move = tuple[str, tuple, Node]
NAMES = "ABCD"


def put(items: tuple, index: int, value: Any) -> tuple:
    return (*items[:index], value, *items[index + 1 :])


def slot_of(inc: str) -> int:
    return NAMES.index(inc[0])


def canonical(hub: HubState) -> HubState:
    """The state without words, and without what only the clock sets."""
    workers = tuple(
        replace(each, heard_s=0.0, doing="", doing_s=0.0, generation=0, suspicion="!" if each.suspicion else "")
        for each in hub.workers
    )
    preparing = hub.preparing
    if preparing is not None:
        preparing = replace(preparing, reason="", since_s=0.0)
    go = None if hub.go is None else replace(hub.go, reason="")
    end = None if hub.end is None else replace(hub.end, reason="", origin="")
    return replace(hub, workers=workers, preparing=preparing, go=go, end=end, quarrels=(), fruitless=0, arrived_s=0.0)


def plain(effect: Any) -> Any:
    """The effect without words; None: workers do not act on it."""
    if isinstance(effect, Journal) and isinstance(effect.record, GoRecord):
        return Journal(record=GoRecord(go=replace(effect.record.go, reason="")))
    if isinstance(effect, Send):
        frame = effect.frame
        if isinstance(frame, Prep | Go):
            return Send(inc=effect.inc, frame=replace(frame, reason=""))
        if isinstance(frame, End):
            return Send(inc=effect.inc, frame=replace(frame, reason="", origin=""))
        return effect if isinstance(frame, Started) else None
    return effect


def compact(records: tuple) -> tuple:
    """The entries of a journal that matter."""
    last = {type(record): record for record in records}
    started = ReadyRecord in last or any(isinstance(each, GoRecord) and each.go.num_veterans for each in records)
    kinds = (RunRecord, EpochRecord, GoRecord, ReadyRecord, PointerRecord, EndRecord)
    if started:
        last[ReadyRecord] = ReadyRecord(generation=0)
    return tuple(last[kind] for kind in kinds if kind in last)
