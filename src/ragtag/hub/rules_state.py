"""The values of the hub's rules: what it knows, what happens to it, what it does, and what it writes down.

The one idea: everything is a frozen value, so that the hub is one pure function over them (`rules.advance`) that the
network service runs and that the tests search exhaustively.
"""

from typing import Literal

import msgspec

from ragtag.hub.frames import End, FromHub, FromWorker, Go, Join, Member

GENERATIONS_PER_EPOCH = 1_000_000
"""A generation's number is epoch x this + counter: a restarted hub never uses a number again."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all."""


class RunSettings(Value, frozen=True, kw_only=True):
    """What a run's hub is started with."""

    run: str
    version: str
    patience_s: float


# What the hub writes down before anybody can see it


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", forbid_unknown_fields=True):
    """Base of the journal's entries."""


class RunRecord(Record, frozen=True, kw_only=True, tag="run"):
    """First entry: which run this is."""

    run: str
    version: str


class EpochRecord(Record, frozen=True, kw_only=True, tag="epoch"):
    """A hub was started; counts from 1."""

    epoch: int


class DescribedRecord(Record, frozen=True, kw_only=True, tag="described"):
    """What the run trains."""

    description: str


class GoRecord(Record, frozen=True, kw_only=True, tag="go"):
    """A generation begins."""

    go: Go


class ReadyRecord(Record, frozen=True, kw_only=True, tag="ready"):
    """All members of the first generation hold the state: from here on it must not be made anew."""

    generation: int


class PointerRecord(Record, frozen=True, kw_only=True, tag="pointer"):
    """The run's newest checkpoint."""

    step: int
    name: str


class EndRecord(Record, frozen=True, kw_only=True, tag="end"):
    """The run is over."""

    end: End


JournalRecord = RunRecord | EpochRecord | DescribedRecord | GoRecord | ReadyRecord | PointerRecord | EndRecord


# What happens to the hub


class Received(Value, frozen=True, kw_only=True):
    """A frame came on the connection of worker `inc`. A connection's first frame is its `Hello`."""

    inc: str
    frame: FromWorker


class Closed(Value, frozen=True, kw_only=True):
    """The connection of worker `inc` ended. Not for one that a newer connection of the same `inc` has replaced."""

    inc: str
    reason: str = "its connection closed"


class Tick(Value, frozen=True, kw_only=True):
    """Time passed: at least once a heartbeat (a tenth of the patience, 2 s at most)."""


class Restarted(Value, frozen=True, kw_only=True):
    """First event of every hub process, before it listens; its effects are done before anybody can connect."""


Event = Received | Closed | Tick | Restarted


# What the hub does


class Send(Value, frozen=True, kw_only=True):
    """Send `frame` to worker `inc`; nothing happens where it is not connected."""

    inc: str
    frame: FromHub


class Journal(Value, frozen=True, kw_only=True):
    """Write `record` down for good (fsync) before the next effect."""

    record: JournalRecord


class CloseConnection(Value, frozen=True, kw_only=True):
    """End the connection of worker `inc`, after what was sent to it. `Closed` need not follow, and may."""

    inc: str
    reason: str


class Log(Value, frozen=True, kw_only=True):
    """Tell people."""

    text: str
    level: Literal["debug", "info", "warning"] = "info"
    """debug: of use to whoever looks for a fault only."""


Effect = Send | Journal | CloseConnection | Log


# What the hub knows


class Worker(Value, frozen=True, kw_only=True):
    """One incarnation, as the hub sees it."""

    member: Member
    expected: int = 1
    connected: bool = True
    generation: int = 0
    """Highest it has said it has seen."""
    heard_s: float = 0.0
    """When it was last heard, by the hub's clock."""
    step: int = 0
    doing: str = ""
    doing_s: float = 0.0
    left: bool = False
    """Its script has ended as it should."""
    suspicion: str = ""
    """Why it is not asked into the next generation; final at the next GO only. Empty: it is trusted."""
    left_out: bool = False
    """A GO went without it, and it has not shown yet that it knows."""

    @property
    def inc(self) -> str:
        """Its incarnation."""
        return self.member.inc

    @property
    def title(self) -> str:
        """Name and host, as people read it."""
        return f"{self.member.name} ({self.member.host})"


class Quarrel(Value, frozen=True, kw_only=True):
    """Two members that could not talk to each other."""

    pair: tuple[str, str]
    """Incarnations, sorted."""
    accused: tuple[str, ...]
    """By whom the other named each time, oldest first."""
    generation: int
    """The last one in which it happened."""
    at_s: float
    newer: str = ""
    """The one of the two that was a newcomer when it happened, and the other was not; empty: neither."""


class Preparing(Value, frozen=True, kw_only=True):
    """A generation that forms."""

    generation: int
    members: tuple[str, ...]
    soft: bool
    told: bool
    """Whether members of the last generation know; those of a soft one are told when the newcomers have answered."""
    reason: str
    since_s: float
    """When it began; once the first old member has answered a soft one, when that was."""
    joins: tuple[Join, ...] = ()
    """Sorted by incarnation."""
    last_chance: bool = False
    """Suspected members were taken back, since nobody else holds the state."""
    came_s: float | None = None
    """When the first member that holds the state answered in a last chance; None: none has."""
    after_failure: bool = False


class HubState(Value, frozen=True, kw_only=True):
    """All the hub knows."""

    settings: RunSettings
    epoch: int = 0
    """Of this hub process; 0: it has not begun."""
    counter: int = 0
    """Of generations announced in this epoch."""
    known: bool = False
    """Whether the journal has the run's first entry."""
    description: str = ""
    checkpoint_step: int = 0
    checkpoint: str = ""
    go: Go | None = None
    """The last journalled."""
    started: bool = False
    """Whether the state exists for good: see `ReadyRecord`."""
    ready: tuple[str, ...] = ()
    """Members of a first generation that hold the state, sorted."""
    preparing: Preparing | None = None
    workers: tuple[Worker, ...] = ()
    """In order of arrival."""
    arrived_s: float = 0.0
    """When the last new worker arrived."""
    quarrels: tuple[Quarrel, ...] = ()
    digests: tuple[tuple[int, str], ...] = ()
    """(step, digest) of the last steps that were reported applied, in order."""
    fruitless: int = 0
    """Generations in a row that failed before a step was applied."""
    end: End | None = None

    @property
    def generation(self) -> int:
        """Number of the generation announced last in this epoch."""
        return self.epoch * GENERATIONS_PER_EPOCH + self.counter

    def worker(self, inc: str) -> Worker | None:
        """The worker with this incarnation, where it is known."""
        return next((worker for worker in self.workers if worker.member.inc == inc), None)

    @property
    def members(self) -> tuple[str, ...]:
        """Incarnations of the last generation, by rank."""
        return () if self.go is None else tuple(member.inc for member in self.go.members)
