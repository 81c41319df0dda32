"""An island's side of the conversation with the hub: what it has asked for, what is on its way, what has come.

The one idea: what was begun, in either direction, outlives the connection. Whoever connects again says what it has, and
everything goes on from there. No sockets and no threads here: messages in, messages out, a clock given.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from ragtag.core.errors import LaunchError
from ragtag.outer.codec import decode
from ragtag.outer.island import InFlight, IslandValues
from ragtag.outer.protocol import (
    Attach,
    Attached,
    Content,
    Denied,
    Fetch,
    Frame,
    Gone,
    Kind,
    Merged,
    Offer,
    Opened,
    Piece,
    Ready,
    Refused,
    Retuned,
    Stage,
    Taken,
    Tempo,
    from_hub,
    pack,
)
from ragtag.outer.transfer import Incoming, digest, pieces

_REMEMBERED = 8
"""Transfers whose times are compared."""


class Talk:
    """What one island and the hub have said to each other.

    Args:
        attach: says what this island is; made anew for each connection.
        where: address and port of the hub, for messages.
        clock: seconds that only ever grow.
    """

    def __init__(
        self, attach: Callable[[], Attach], *, where: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._attach, self._where, self._clock = attach, where, clock
        first = attach()
        self._numel = first.numel
        self.values = IslandValues(first.island, first.session)
        self.attached: Attached | None = None
        """The newest answer of the hub; None: there was none yet."""
        self.stage = ""
        self.tempo: Tempo | None = None
        self.step = 0.0
        """Steps of all islands together, by samples."""
        self.opened: dict[int, int] = {}
        """By fragment, the version from which somebody has sent a delta."""
        self.state: bytes | None = None
        """What `fetch_all` has brought besides values."""
        self.exchange_s = 0.0
        """Seconds that a fragment's way there and back takes, without waiting for others; 0: not known yet."""
        self.fetching = False
        """Whether `fetch_all` is under way."""
        self.sent_bytes = self.received_bytes = 0
        self.trouble = "no connection was made yet"
        self.open = False
        """Whether the hub has taken this island, on the connection that there is."""
        self._newest: dict[int, tuple[int, int]] = {}
        """By fragment, the hub's version and which own delta is in it."""
        self._words: deque[bytes] = deque()
        self._outgoing: deque[InFlight] = deque()
        self._refused: list[Offer] = []
        self._offered: InFlight | None = None
        """What the hub was told last that it may have."""
        self._upload: Iterator[bytes] | None = None
        self._incoming: dict[tuple[Kind, int], tuple[Content, Incoming]] = {}
        self._wanted: set[tuple[Kind, int]] = set()
        """What was asked for on this connection."""
        self._starting: dict[int, tuple[int, torch.Tensor]] | None = None
        self._wants_state = False
        self._took_s: dict[str, float] = {}
        self._ways_s: tuple[deque[float], deque[float]] = (deque(maxlen=_REMEMBERED), deque(maxlen=_REMEMBERED))
        """Of the last fragments, seconds there, and back."""

    @property
    def newest(self) -> bool:
        """Whether the values are the hub's newest, as far as is known."""
        return all(version >= self._newest.get(p, (0, 0))[0] for p, version in enumerate(self.values.versions))

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to be sent."""
        return not self._words and not self._outgoing

    def take_refused(self) -> list[Offer]:
        """The deltas that the hub has refused since this was asked last."""
        refused, self._refused = self._refused, []
        return refused

    # Connections

    def begin(self) -> bytes:
        """A connection was made: what is said first on it."""
        self._wanted.clear()
        self._offered = self._upload = None
        return pack(self._attach())

    def end(self) -> None:
        """The connection is gone."""
        self.open = False

    # What goes

    def say(self, frame: Frame) -> None:
        """Queue a frame; it is lost where the connection breaks first."""
        self._words.append(pack(frame))

    def send(self, fragment: int, own: torch.Tensor, **about: object) -> None:
        """Send the difference of a fragment that was reserved (see `IslandValues.send`)."""
        self._outgoing.append(self.values.send(fragment, own, **about))  # pyright: ignore[reportArgumentType]

    def give(self, values: Sequence[torch.Tensor], state: bytes, *, step: int) -> None:
        """Send the values that all islands begin with, and what else newcomers need."""
        session = self.values.session
        self.values.begin([each.clone() for each in values], [1] * len(values), [0] * len(values))
        for fragment, each in enumerate(values):
            data = each.numpy().tobytes()
            self._outgoing.append(_flight(f"{session}/theta/{fragment}", "theta", fragment, data, step))
        self._outgoing.append(_flight(f"{session}/state", "state", 0, state, step))

    def fetch_all(self, *, state: bool = True) -> None:
        """Bring all values as they are now, and the state; `values.begun` and `state` say that they are here."""
        self._starting, self._wants_state = {}, state
        self._resume_start()

    def next_message(self) -> bytes | None:
        """What is to be sent now: words first, then what is on its way; None: nothing."""
        if self._words:
            return self._words.popleft()
        if not self.open or not self._outgoing:
            return None
        if self._offered is not self._outgoing[0]:
            self._offered, self._upload = self._outgoing[0], None
            self._took_s[self._offered.offer.key] = self._clock()
            return pack(self._offered.offer)
        return None if self._upload is None else next(self._upload, None)

    def _uploading(self, flight: InFlight, offset: int) -> Iterator[bytes]:
        for piece, payload in pieces(flight.offer.key, flight.data, offset):
            self.sent_bytes += len(payload)
            yield pack(piece, payload)

    # What comes

    def heard(self, message: bytes) -> None:
        """Take in what the hub has sent.

        Raises:
            LaunchError: the hub does not take this island, ever.
            msgspec.DecodeError, TransferError, WorthlessDelta: it is damaged; the connection is to be made anew.
        """
        frame, payload = from_hub(message)
        if isinstance(frame, Piece):
            self._piece(frame, payload)
        elif isinstance(frame, Attached):
            self._attached_to(frame)
        elif isinstance(frame, Denied):
            raise LaunchError(f"The outer loop at {self._where} does not take this island: {frame.reason}.")
        elif isinstance(frame, Stage):
            self.stage, self.step = frame.stage, max(self.step, float(frame.step))
        elif isinstance(frame, Ready):
            if self._offered is not None and self._offered.offer.key == frame.key:
                self._upload = self._uploading(self._offered, frame.offset)
        elif isinstance(frame, Taken | Refused):
            self._answered(frame)
        elif isinstance(frame, Opened):
            self.opened[frame.fragment] = frame.version
        elif isinstance(frame, Merged):
            self.step = max(self.step, frame.step)
            self._newest[frame.fragment] = frame.version, frame.merged
            self._catch_up(frame.fragment)
        elif isinstance(frame, Content):
            self._content(frame)
        elif isinstance(frame, Gone):
            self._gone(frame)
        elif isinstance(frame, Retuned):
            self.tempo = frame.tempo

    def _attached_to(self, frame: Attached) -> None:
        self.open = True
        self.attached, self.stage, self.tempo = frame, frame.stage, frame.tempo
        self.step = max(self.step, float(frame.step))
        if self._starting is not None:
            self._resume_start()
        if frame.stage != "open" or not self.values.begun:
            return
        flights = self.values.in_flight
        self._outgoing = deque(flights[fragment] for fragment in self.values.attached(frame.versions, frame.sequences))
        for fragment, version in enumerate(frame.versions):
            if version > self.values.versions[fragment]:
                self._catch_up(fragment)

    def _answered(self, frame: Taken | Refused) -> None:
        if not self._outgoing or self._outgoing[0].offer.key != frame.key:
            return
        flight = self._outgoing.popleft()
        if flight.offer.kind == "delta" and not flight.offer.final:  # which is larger, and the last
            self._measure(frame.key)
        flight.taken = isinstance(frame, Taken)
        if isinstance(frame, Refused):
            self.trouble = f"{flight.offer.kind} of fragment {flight.offer.fragment} was refused: {frame.reason}"
            if flight.offer.kind == "delta":
                self.values.refused(flight.offer.fragment, frame.key)
                self._refused.append(flight.offer)

    def _want(self, kind: Kind, fragment: int, version: int = 0) -> None:
        """Ask for something, from where an earlier answer broke off."""
        if (kind, fragment) in self._wanted or not self.open:
            return
        self._wanted.add((kind, fragment))
        offset = 0
        known = self._incoming.get((kind, fragment))
        if known is not None and (version or known[0].version) == known[0].version:
            offset = known[1].received
        self._took_s[f"{kind}/{fragment}"] = self._clock()
        self.say(Fetch(kind=kind, fragment=fragment, version=version, offset=offset))

    def _resume_start(self) -> None:
        assert self._starting is not None
        for fragment in range(len(self._numel)):
            if fragment not in self._starting:
                self._want("theta", fragment)
        if self._wants_state and self.state is None:
            self._want("state", 0)

    def _catch_up(self, fragment: int) -> None:
        if self.values.begun and self._starting is None:
            self._want("update", fragment, self.values.versions[fragment] + 1)

    def _content(self, frame: Content) -> None:
        where = frame.kind, frame.fragment
        known = self._incoming.get(where)
        if known is None or (known[0].version, known[0].digest) != (frame.version, frame.digest):
            self._incoming[where] = frame, Incoming(frame.key, frame.num_bytes, frame.digest)
        else:
            self._incoming[where] = frame, known[1]
        if self._incoming[where][1].complete:
            self._came(*self._incoming.pop(where))

    def _piece(self, piece: Piece, payload: memoryview) -> None:
        for where, (content, incoming) in self._incoming.items():
            if incoming.key == piece.key:
                self.received_bytes += len(payload)
                incoming.take(piece, payload)
                if incoming.complete:
                    del self._incoming[where]
                    self._came(content, incoming)
                return

    def _came(self, content: Content, incoming: Incoming) -> None:
        data, fragment = incoming.whole(), content.fragment
        self._wanted.discard((content.kind, fragment))
        if content.kind == "state":
            self.state = bytes(data)
            self._started()
            return
        if self._starting is not None and content.kind == "theta":
            self._starting[fragment] = content.version, decode("fp32", data, self._numel[fragment])
            self._started()
            return
        if content.kind == "theta":
            self.values.replace(fragment, content.version, data)
        elif content.version == self.values.versions[fragment] + 1:
            self.values.update(fragment, content.version, data, content.codec)
            if self.tempo is not None and content.codec == self.tempo.codec:  # what comes last is larger
                self._measure(f"update/{fragment}")
        known = self._newest.get(fragment, (0, 0))
        if content.newest >= known[0]:
            self._newest[fragment] = content.newest, content.merged
        newest, merged = self._newest[fragment]
        if self.values.versions[fragment] < newest:
            self._catch_up(fragment)
        else:
            self.values.arrive(fragment, merged)

    def _started(self) -> None:
        starting = self._starting
        if starting is None or len(starting) < len(self._numel) or (self._wants_state and self.state is None):
            return
        assert self.attached is not None
        fragments = range(len(self._numel))
        sequences = self.attached.sequences
        self._starting, self.fetching = None, False
        self.values.begin([starting[p][1] for p in fragments], [starting[p][0] for p in fragments], sequences)
        for fragment, (newest, _) in self._newest.items():
            if newest > self.values.versions[fragment]:
                self._catch_up(fragment)

    def _gone(self, frame: Gone) -> None:
        self._wanted.discard((frame.kind, frame.fragment))
        self._incoming.pop((frame.kind, frame.fragment), None)
        if frame.kind == "update":
            self._want("theta", frame.fragment)

    def _measure(self, what: str) -> None:
        began_s = self._took_s.pop(what, None)
        if began_s is None:
            return
        self._ways_s[what.startswith("update/")].append(self._clock() - began_s)
        if all(self._ways_s):
            self.exchange_s = sum(map(statistics.median, self._ways_s))


def _flight(key: str, kind: Kind, fragment: int, data: bytes, step: int) -> InFlight:
    offer = Offer(
        key=key,
        kind=kind,
        fragment=fragment,
        num_bytes=len(data),
        digest=digest(data),
        codec="fp32" if kind == "theta" else "raw",
        step=step,
    )
    return InFlight(offer, data, torch.empty(0))
