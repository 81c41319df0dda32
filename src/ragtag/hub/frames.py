"""What workers and the hub say to one another: one JSON object a WebSocket message, decoded into frozen structs.

The one idea: every frame names the run, the generation and the incarnation it speaks for, so whatever arrives late, or
from somebody who was evicted, is recognised and dropped. docs/membership.md has the rules.
"""

from typing import Literal

import msgspec

FRAME_LIMIT_BYTES = 4 << 20
"""Longest message that either side accepts."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a generation, as the others need to know it."""

    inc: str
    """Incarnation: random, new for every process and after every eviction."""
    name: str
    """What people call it: the device's name, or host and local rank."""
    host: str
    address: str
    """Where it listens for data, as other members reach it."""
    store_port: int
    """Of the store it offers at `address`; the first member's is used."""
    boot_id: str = ""
    local_rank: int = 0


# Worker to hub


class Hello(Frame, frozen=True, kw_only=True, tag="hello"):
    """First frame of every connection; again after each reconnection, with the same `inc`."""

    run: str
    version: str
    member: Member
    generation: int
    """Highest generation seen; 0: none."""
    has_state: bool
    """Whether it holds the run's parameters, optimizer state and position."""
    expected: int = 1
    """How many workers its machine starts: what the first generation waits for."""


class Join(Frame, frozen=True, kw_only=True, tag="join"):
    """The answer to `Prep`: this worker has left all older groups and waits."""

    generation: int
    inc: str
    has_state: bool
    applied: int = 0
    """Number of the last step applied."""
    applied_digest: str = ""
    held_digest: str = ""
    """Of step `applied` + 1 where its complete reduced gradient and all ballots are held; empty: they are not."""
    in_call: str = ""
    """The collective call it was in ("evaluating", "saving"), which newcomers cannot take part in; empty: a step."""


class Fail(Frame, frozen=True, kw_only=True, tag="fail"):
    """A generation cannot go on here."""

    generation: int
    inc: str
    reason: str
    suspect: str = ""
    """The incarnation that is to blame, as far as this worker can tell; empty: nobody in particular."""


class Beat(Frame, frozen=True, kw_only=True, tag="beat"):
    """Sign of life, from a thread: about every tenth of the patience."""

    generation: int
    inc: str
    step: int
    doing: str
    doing_s: float
    """For how long it has been doing that."""
    applied: int = 0
    applied_digest: str = ""


class Ready(Frame, frozen=True, kw_only=True, tag="ready"):
    """A newcomer has copied the state, or a first generation has made it: from now on it is a veteran."""

    generation: int
    inc: str


class Trouble(Frame, frozen=True, kw_only=True, tag="trouble"):
    """The script of this worker failed: the run ends everywhere with this error."""

    generation: int
    inc: str
    step: int
    text: str
    interrupted: bool = False


class Leave(Frame, frozen=True, kw_only=True, tag="leave"):
    """The script of this worker has ended as it should."""

    generation: int
    inc: str


class Described(Frame, frozen=True, kw_only=True, tag="described"):
    """What the run trains (a fingerprint of model, data and settings), from the first generation's rank 0."""

    generation: int
    inc: str
    description: str


class Checkpointed(Frame, frozen=True, kw_only=True, tag="checkpointed"):
    """A checkpoint lies complete under its own name; may the run's pointer move to it?"""

    generation: int
    inc: str
    step: int
    name: str


class Logged(Frame, frozen=True, kw_only=True, tag="logged"):
    """Lines of the run's event log, JSON objects; they change nothing."""

    inc: str
    lines: tuple[msgspec.Raw, ...]


# Hub to worker


class Welcome(Frame, frozen=True, kw_only=True, tag="welcome"):
    """The answer to `Hello`."""

    epoch: int
    patience_s: float
    description: str = ""
    """Of what the run trains, once known: a newcomer compares before it takes part."""
    checkpoint: str = ""


class Refused(Frame, frozen=True, kw_only=True, tag="refused"):
    """This worker is not taken: wrong run, version or settings. The connection ends."""

    reason: str


class Prep(Frame, frozen=True, kw_only=True, tag="prep"):
    """A new generation forms. Members answer `Join`; everybody else stops and keeps what it has."""

    generation: int
    members: tuple[str, ...]
    """Incarnations."""
    soft: bool
    """Nobody is lost: members go on to the next step boundary, which they agree on in their vote, and answer there."""
    reason: str


class Go(Frame, frozen=True, kw_only=True, tag="go"):
    """A generation begins. Whoever is not in it wipes everything and asks to join as new."""

    generation: int
    members: tuple[Member, ...]
    """By rank. Veterans first, by their earlier rank, then newcomers."""
    num_veterans: int
    """0 in a run's first generation only."""
    base: int
    """The step that all veterans have applied once `action` is done; newcomers copy the state at it."""
    action: Literal["start", "apply", "redo"]
    """start: nobody has state, rank 0's values are taken. apply: veterans at `base` - 1 apply what they hold.
    redo: held gradients of step `base` + 1 are void; own sums stay, what is in none of them is shared out."""
    reason: str


class Started(Frame, frozen=True, kw_only=True, tag="started"):
    """All members of the first generation hold the state, and that is written down: now they may vote."""

    generation: int


class End(Frame, frozen=True, kw_only=True, tag="end"):
    """The run is over, everywhere."""

    reason: str
    origin: str = ""
    """Name of the worker whose failure it is; empty: nobody's."""
    failed: bool = True


class Pointed(Frame, frozen=True, kw_only=True, tag="pointed"):
    """The answer to `Checkpointed`."""

    step: int
    name: str
    moved: bool
    reason: str = ""


FromWorker = Hello | Join | Fail | Beat | Ready | Trouble | Leave | Described | Checkpointed
FromHub = Welcome | Refused | Prep | Go | Started | End | Pointed


def encode(frame: Frame) -> bytes:
    """The frame as JSON."""
    return msgspec.json.encode(frame)


def from_worker(data: bytes | str) -> FromWorker | Logged:
    """Read what a worker sent. Raises msgspec.DecodeError or ValidationError for anything else."""
    return msgspec.json.decode(data, type=FromWorker | Logged)


def from_hub(data: bytes | str) -> FromHub:
    """Read what the hub sent. Raises msgspec.DecodeError or ValidationError for anything else."""
    return msgspec.json.decode(data, type=FromHub)
