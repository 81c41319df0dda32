"""What islands and the outer process say to one another: a JSON head, then raw bytes, in one WebSocket message.

The one idea: whatever moves is named by what it is (kind, fragment, version) and by who counts it (island, sequence).
So a message that comes late, twice, or from an island with an old state is recognised by its name alone. Nothing is
unpickled; every piece carries a checksum, and the whole carries another one.
"""

import struct
from typing import Literal, TypeAlias

import msgspec

_HEAD = struct.Struct("<I")
HEAD_LIMIT_BYTES = 1 << 20
PIECE_BYTES = 1 << 16
"""Payload of one message: what is sent again at most after a connection broke."""

Kind: TypeAlias = Literal["delta", "update", "theta", "state"]
"""delta: base minus own values, to be merged. update: what a merge has added to the values. theta: the values
themselves. state: a file with what else a newcomer needs, such as the optimizer's state."""
Codec: TypeAlias = Literal["int4", "fp32", "raw"]


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all."""


class Tempo(msgspec.Struct, frozen=True, kw_only=True):
    """How islands are to go on: decided in one place, the same for all."""

    inner_steps: int
    """H: steps from one exchange of a fragment to the next."""
    blocking: bool = False
    """Islands wait for each exchange: exact synchronisation where H is 1."""
    asynchronous: bool = False
    """What comes is merged when it comes; nobody is waited for."""
    codec: Codec = "int4"
    rate: float = 0.7
    """Learning rate of the outer optimizer."""
    shares: tuple[tuple[str, float], ...] = ()
    """By island, its part of the global batch; empty: all the same."""
    reason: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's outer loop is to be, as the script of its first island says; the others' words do not count."""

    inner_steps: int | None = None
    """H; None: follows the measured time of an exchange."""
    blocking: bool = False
    asynchronous: bool = False
    codec: Codec = "int4"
    rate: float = 0.7
    """Learning rate of the outer optimizer."""
    momentum: float = 0.5
    oldest: int = 2
    """Versions that a contribution may be late."""


# Island to hub


class Attach(Frame, frozen=True, kw_only=True, tag="attach"):
    """First frame of every connection."""

    run: str
    version: str
    island: str
    session: str
    """Random, new for each process that leads an island."""
    model: str
    """Hash of names and shapes of all parameters, and of how they are cut into fragments."""
    numel: tuple[int, ...]
    """Numbers in each fragment."""
    data: Literal["global", "local"] = "global"
    dataset: int = 1
    """Samples of this island's data."""
    batch: int
    """Samples of one step of all islands together."""
    wanted: Wanted = Wanted()
    step: int = 0
    samples_per_s: float = 0.0
    training: bool = False
    """As in `Beat`."""


class Offer(Frame, frozen=True, kw_only=True, tag="offer"):
    """This island has something to send; pieces follow once the hub is `Ready`."""

    key: str
    """Names this transfer, also after a reconnection."""
    kind: Kind
    fragment: int = 0
    base: int = 0
    """Version of the values that a delta was taken from."""
    sequence: int = 0
    """Of this island's deltas of this fragment, this is number `sequence`."""
    tokens: float = 0.0
    """Total weight of the samples behind it."""
    samples: int = 0
    steps: int = 0
    codec: Codec = "fp32"
    num_bytes: int
    digest: str
    final: bool = False
    """The island's last one of this fragment: what the merge changes travels in fp32, too."""
    step: int = 0
    """Steps that this island has done."""


class Piece(Frame, frozen=True, kw_only=True, tag="piece"):
    """Some bytes of a transfer; either way."""

    key: str
    offset: int
    crc32: int


class Fetch(Frame, frozen=True, kw_only=True, tag="fetch"):
    """This island wants something, from `offset` on."""

    kind: Kind
    fragment: int = 0
    version: int = 0
    offset: int = 0


class Beat(Frame, frozen=True, kw_only=True, tag="beat"):
    """How this island is."""

    step: int
    inner_s: float = 0.0
    """Seconds of one inner step."""
    outer_s: float = 0.0
    """Seconds that one exchange of all fragments keeps the link busy; 0: not known yet."""
    waited_s: float = 0.0
    """Seconds for which it has waited for exchanges so far."""
    compute_s: float = 0.0
    """Seconds that its steps have taken so far, waiting aside."""
    samples_per_s: float = 0.0
    training: bool = False
    """It has values, and trains with the others: merges wait for it, as long as they wait for anybody."""
    finished: bool = False
    """It has done its last step, and sent what it had."""


class Reading(Frame, frozen=True, kw_only=True, tag="reading"):
    """The loss of fresh batches before and after an arrival, as this island has seen it."""

    fragment: int
    version: int
    before: float
    after: float
    noise: float
    """Standard error of their difference."""


class Detach(Frame, frozen=True, kw_only=True, tag="detach"):
    """This island leaves."""

    reason: str = ""


# Hub to island


class Attached(Frame, frozen=True, kw_only=True, tag="attached"):
    """The answer to `Attach`."""

    epoch: int
    """How often the outer process has started."""
    stage: Literal["alone", "wait", "open", "over"]
    """alone: this island warms up, and gives the values that all begin with. wait: another one does. open: they are
    there. over: all islands have done their last step, and everything is merged."""
    versions: tuple[int, ...]
    sequences: tuple[int, ...]
    """By fragment, the last delta that came whole from this island."""
    step: int
    """Steps of all islands together, by samples."""
    islands: int = 1
    """How many are attached, this one included."""
    tempo: Tempo


class Denied(Frame, frozen=True, kw_only=True, tag="denied"):
    """This island is not taken; the connection ends."""

    reason: str


class Stage(Frame, frozen=True, kw_only=True, tag="stage"):
    """See `Attached.stage`."""

    stage: Literal["alone", "wait", "open", "over"]
    step: int = 0


class Ready(Frame, frozen=True, kw_only=True, tag="ready"):
    """Send `key` from `offset` on."""

    key: str
    offset: int


class Taken(Frame, frozen=True, kw_only=True, tag="taken"):
    """All of `key` has come, and is counted or will be."""

    key: str


class Refused(Frame, frozen=True, kw_only=True, tag="refused"):
    """`key` is worth nothing here, and why."""

    key: str
    reason: str


class Opened(Frame, frozen=True, kw_only=True, tag="opened"):
    """Somebody's delta from `version` is there: whoever is nearly done sends its own."""

    fragment: int
    version: int


class Merged(Frame, frozen=True, kw_only=True, tag="merged"):
    """A fragment has values of a new version."""

    fragment: int
    version: int
    merged: int
    """Of the deltas of the island that this is told, the newest one in these values; 0: none."""
    step: float = 0.0
    """Steps of all islands together that are in it, by samples: where learning rates are to be."""


class Content(Frame, frozen=True, kw_only=True, tag="content"):
    """The answer to `Fetch`; pieces follow."""

    key: str
    kind: Kind
    fragment: int
    version: int
    codec: Codec
    num_bytes: int
    digest: str
    newest: int = 0
    """Version of the hub's values when this was said."""
    merged: int = 0
    """As in `Merged`, of those."""


class Gone(Frame, frozen=True, kw_only=True, tag="gone"):
    """What was to be fetched is not there (any more)."""

    kind: Kind
    fragment: int
    version: int


class Retuned(Frame, frozen=True, kw_only=True, tag="retuned"):
    """Go on as this says."""

    tempo: Tempo


FromIsland: TypeAlias = Attach | Offer | Piece | Fetch | Beat | Reading | Detach
FromHub: TypeAlias = (
    Attached | Denied | Stage | Ready | Taken | Refused | Opened | Merged | Content | Piece | Gone | Retuned
)

_from_island = msgspec.json.Decoder(FromIsland)
_from_hub = msgspec.json.Decoder(FromHub)


def pack(frame: Frame, payload: bytes | memoryview = b"") -> bytes:
    """One message."""
    head = msgspec.json.encode(frame)
    return b"".join((_HEAD.pack(len(head)), head, payload))


def from_island(message: bytes | memoryview) -> tuple[FromIsland, memoryview]:
    """Read what an island sent. Raises msgspec.DecodeError for anything else."""
    head, payload = _cut(message)
    return _decoded(_from_island, head), payload


def from_hub(message: bytes | memoryview) -> tuple[FromHub, memoryview]:
    """Read what the hub sent. Raises msgspec.DecodeError for anything else."""
    head, payload = _cut(message)
    return _decoded(_from_hub, head), payload


def _cut(message: bytes | memoryview) -> tuple[memoryview, memoryview]:
    view = memoryview(message)
    if len(view) < _HEAD.size:
        raise msgspec.DecodeError("shorter than its own length")
    (length,) = _HEAD.unpack_from(view)
    if length > HEAD_LIMIT_BYTES or _HEAD.size + length > len(view):
        raise msgspec.DecodeError(f"a head of {length} bytes in a message of {len(view)}")
    return view[_HEAD.size : _HEAD.size + length], view[_HEAD.size + length :]


def _decoded(decoder: msgspec.json.Decoder, head: memoryview):
    try:
        return decoder.decode(head)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
