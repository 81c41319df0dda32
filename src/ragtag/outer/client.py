"""An island's connection to the outer loop: one daemon thread that sends, fetches, and comes back whenever it breaks.

The one idea: the training thread only hands over a snapshot and takes what has arrived; encoding, decoding and all
waits are on this thread. What it has begun to send or fetch it goes on with after a reconnection, where it stopped.
"""

import asyncio
import os
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import torch
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from ragtag.core.errors import LaunchError, RagtagError
from ragtag.hub.connection import check_token, client_tls, drop_unacknowledged, silent_logger
from ragtag.hub.frames import FRAME_LIMIT_BYTES
from ragtag.hub.relay import PATH
from ragtag.outer.codec import WorthlessDelta, decode
from ragtag.outer.island import InFlight, IslandValues
from ragtag.outer.protocol import (
    Attach,
    Attached,
    Beat,
    Content,
    Denied,
    Detach,
    Fetch,
    Frame,
    Gone,
    Kind,
    Merged,
    Offer,
    Opened,
    Piece,
    Reading,
    Ready,
    Refused,
    Retuned,
    Stage,
    Taken,
    Tempo,
    from_hub,
    pack,
)
from ragtag.outer.transfer import Incoming, TransferError, digest, pieces

_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 2.0
_FAREWELL_S = 0.5
_LONGEST_OPENING_S = 10.0
_REMEMBERED = 8
"""Transfers whose times are compared."""


class IslandClient:
    """Connects at once, and again whenever the connection breaks, until closed or denied.

    Args:
        address, port: of the hub.
        token: of the run.
        attach: says what this island is; made anew for each connection.
        patience_s: from which beats and time-outs are derived, in seconds.
    """

    def __init__(self, address: str, port: int, token: str, attach: Callable[[], Attach], *, patience_s: float) -> None:
        check_token(token)
        self.address, self.port = address, port
        self._token, self._attach, self._patience_s = token, attach, patience_s
        self._tls = client_tls(os.environ.get("RAGTAG_OUTER_TLS", ""))
        first = attach()
        self._numel = first.numel
        self.values = IslandValues(first.island, first.session)
        """Touched under `lock` only."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.error: RagtagError | None = None
        """Why it has given up for good; None: it has not."""
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
        self.exchange_s: float = 0.0
        """Seconds that a fragment's way there and back takes, without waiting for others; 0: not known yet."""
        self.said_finished = False
        """Whether the hub knows that nothing more comes."""
        self.fetching = False
        """Whether `fetch_all` is under way."""
        self.sent_bytes = self.received_bytes = 0
        self.trouble = "no connection was made yet"
        self._beat = Beat(step=first.step)
        self._connected_s: float | None = None
        self._newest: dict[int, tuple[int, int]] = {}
        """By fragment, the hub's version and which own delta is in it."""
        self._outgoing: deque[InFlight] = deque()
        self._incoming: dict[tuple[Kind, int], tuple[Content, Incoming]] = {}
        self._wanted: set[tuple[Kind, int]] = set()
        """What was asked for on this connection."""
        self._starting: dict[int, tuple[int, torch.Tensor]] | None = None
        self._wants_state = False
        self._took_s: dict[str, float] = {}
        self._ways_s: tuple[deque[float], deque[float]] = (deque(maxlen=_REMEMBERED), deque(maxlen=_REMEMBERED))
        """Of the last fragments, seconds there, and back."""
        self._words: deque[bytes] = deque()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._ready: Ready | None = None
        self._thread = threading.Thread(target=self._run, name="ragtag-outer", daemon=True)
        self._thread.start()

    # For the training thread

    @property
    def connected(self) -> bool:
        """Whether the hub answers."""
        return self._connected_s is not None

    def note(self, beat: Beat) -> None:
        """How this island is."""
        self._beat = beat

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `ready`, which is asked under the lock, came true in time. Raises what made this client give up."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.error is not None, timeout_s)
            if self.error is not None:
                raise self.error
            return ready()

    def send(self, fragment: int, take: Callable[[], torch.Tensor], **about: object) -> bool:
        """Send what `IslandValues.send` makes of the snapshot that `take` takes now; it is encoded on the client's
        thread. False: something of this fragment is on its way, and nothing was taken."""
        with self.lock:
            if not self.values.reserve(fragment):
                return False
        own = take()
        self._call(lambda: self._send(fragment, own, about))
        return True

    def busy(self, fragment: int) -> bool:
        """Whether something of this fragment is on its way; under the lock."""
        return self.values.is_busy(fragment)

    def give(self, values: Sequence[torch.Tensor], state: bytes, *, step: int) -> None:
        """Send the values that all islands begin with, and what else newcomers need."""
        session = self.values.session
        offers: list[InFlight] = []
        for fragment, each in enumerate(values):
            data = each.numpy().tobytes()
            offers.append(_flight(f"{session}/theta/{fragment}", "theta", fragment, data, step))
        offers.append(_flight(f"{session}/state", "state", 0, state, step))
        with self.lock:
            self.values.begin([each.clone() for each in values], [1] * len(values), [0] * len(values))
        self._call(lambda: self._queue(offers))

    def fetch_all(self, *, state: bool = True) -> None:
        """Bring all values as they are now, and the state; `values.begun` and `state` say that they are here."""
        if not self.fetching:
            self.fetching = True
            self._call(lambda: self._fetch_all(state=state))

    @property
    def newest(self) -> bool:
        """Whether the values are the hub's newest, as far as is known; under the lock."""
        return all(version >= self._newest.get(p, (0, 0))[0] for p, version in enumerate(self.values.versions))

    def say(self, frame: Reading | Detach | Beat) -> None:
        """Queue a frame; it is lost where the connection breaks first."""
        self._words.append(pack(frame))
        self._call(lambda: None)

    def close(self, reason: str = "") -> bool:
        """Say goodbye, if that takes no longer than a moment, and end; return whether the thread ended."""
        if self.connected and self.error is None:
            self.say(Detach(reason=reason))
        self._closing = True
        self._call(lambda: None)
        self._thread.join(2 * _FAREWELL_S)
        self._call(self._over.set)
        self._thread.join(2 * _FAREWELL_S + 1.0)
        return not self._thread.is_alive()

    def _call(self, action: Callable[[], None]) -> None:
        def acting() -> None:
            action()
            self._news.set()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(acting)

    # On the client's thread

    def _send(self, fragment: int, own: torch.Tensor, about: dict[str, object]) -> None:
        with self.lock:
            flight = self.values.send(fragment, own, **about)  # pyright: ignore[reportArgumentType]
        self._queue([flight])

    def _queue(self, flights: Sequence[InFlight]) -> None:
        self._outgoing.extend(flights)

    def _fetch_all(self, *, state: bool) -> None:
        self._starting, self._wants_state = {}, state
        self._resume_start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep_connected())
        except RagtagError as error:
            self._fail(error)
        except BaseException as error:
            ended = LaunchError(
                f"ragtag's connection to the outer loop at {self.address}:{self.port} ended: {error!r}."
            )
            ended.__cause__ = error
            self._fail(ended)
        finally:
            self._connected_s = None
            self._loop.close()

    def _fail(self, error: RagtagError) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    async def _keep_connected(self) -> None:
        over = asyncio.ensure_future(self._over.wait())
        delay_s = _FIRST_DELAY_S
        while not over.done() and not self._closing:
            attempt = asyncio.ensure_future(self._connect_once())
            await asyncio.wait({attempt, over}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                attempt.cancel()
                await asyncio.wait({attempt})
                break
            delay_s = _FIRST_DELAY_S if attempt.result() else min(2 * delay_s, _LAST_DELAY_S)
            await asyncio.wait({over}, timeout=delay_s * (0.5 + random.random()))
        over.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _connect_once(self) -> bool:
        """Connect and talk until the connection breaks; return whether the hub had taken this island."""
        connection = None
        try:
            async with connect(
                f"ws://hub{PATH}" if self._tls is None else f"wss://hub{PATH}",
                host=self.address,
                port=self.port,
                **({} if self._tls is None else {"ssl": self._tls, "server_hostname": self.address}),
                additional_headers={"Authorization": f"Bearer {self._token}"},
                proxy=None,
                compression=None,
                open_timeout=min(self._patience_s, _LONGEST_OPENING_S),
                close_timeout=_FAREWELL_S,
                ping_interval=None,
                max_size=FRAME_LIMIT_BYTES,
                logger=silent_logger(),
            ) as connection:
                sock = connection.transport.get_extra_info("socket")
                drop_unacknowledged(sock, self._patience_s)
                await self._talk(connection)
        except InvalidStatus as error:
            status = error.response.status_code
            self.trouble = f"it answered with HTTP status {status}"
            if status in (401, 403):
                raise LaunchError(
                    f"The hub at {self.address}:{self.port} does not know this run's token. Copy the whole line that "
                    f"`ragtag launch` printed on the first machine."
                ) from None
            if status == 404:
                raise LaunchError(
                    f"The run at {self.address}:{self.port} is not one of islands. Start it with --island NAME."
                ) from None
        except (OSError, WebSocketException, msgspec.DecodeError, TransferError, WorthlessDelta) as error:
            self.trouble = str(error) or type(error).__name__
        finally:
            taken, self._connected_s = self._connected_s is not None, None
            if connection is not None:
                connection.transport.abort()
            with self.changed:
                self.changed.notify_all()
        return taken

    async def _talk(self, connection: ClientConnection) -> None:
        self._wanted.clear()
        self._ready = None
        await connection.send(pack(self._attach()))
        tasks = [
            asyncio.ensure_future(task)
            for task in (self._receive(connection), self._deliver(connection), self._pulse(connection))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if task in done:
                task.result()

    async def _pulse(self, connection: ClientConnection) -> None:
        every_s = min(self._patience_s / 10, 2.0)
        while True:
            await asyncio.sleep(every_s)
            if self._connected_s is not None:
                self._words.append(pack(self._beat))
                self._news.set()

    async def _deliver(self, connection: ClientConnection) -> None:
        offered: InFlight | None = None
        while True:
            self._news.clear()
            while self._words:
                await connection.send(self._words[0])
                self._words.popleft()
            if self._closing and not self._outgoing:
                return
            if self._connected_s is not None and self._outgoing and offered is not self._outgoing[0]:
                offered, self._ready = self._outgoing[0], None
                self._took_s[offered.offer.key] = time.monotonic()
                await connection.send(pack(offered.offer))
            elif offered is not None and self._ready is not None and self._ready.key == offered.offer.key:
                ready, self._ready = self._ready, None
                await self._upload(connection, offered, ready.offset)
            else:
                await self._news.wait()

    async def _upload(self, connection: ClientConnection, flight: InFlight, offset: int) -> None:
        for piece, payload in pieces(flight.offer.key, flight.data, offset):
            if not self._outgoing or self._outgoing[0] is not flight:
                return  # refused meanwhile
            while self._words:
                await connection.send(self._words[0])
                self._words.popleft()
            await connection.send(pack(piece, payload))
            self.sent_bytes += len(payload)

    async def _receive(self, connection: ClientConnection) -> None:
        async for message in connection:
            frame, payload = from_hub(message if isinstance(message, bytes) else message.encode())
            with self.changed:
                self._heard(frame, payload)
                self.changed.notify_all()
            self._news.set()
        self.trouble = f"it closed the connection ({connection.close_reason or connection.close_code})"

    def _heard(self, frame: Frame, payload: memoryview) -> None:
        if isinstance(frame, Piece):
            self._piece(frame, payload)
        elif isinstance(frame, Attached):
            self._attached_to(frame)
        elif isinstance(frame, Denied):
            raise LaunchError(
                f"The outer loop at {self.address}:{self.port} does not take this island: {frame.reason}."
            )
        elif isinstance(frame, Stage):
            self.stage, self.step = frame.stage, max(self.step, float(frame.step))
        elif isinstance(frame, Ready):
            self._ready = frame
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
        self._connected_s = time.monotonic()
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

    # What goes

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

    # What comes

    def _want(self, kind: Kind, fragment: int, version: int = 0) -> None:
        """Ask for something, from where an earlier answer broke off."""
        if (kind, fragment) in self._wanted or self._connected_s is None:
            return
        self._wanted.add((kind, fragment))
        offset = 0
        known = self._incoming.get((kind, fragment))
        if known is not None and (version or known[0].version) == known[0].version:
            offset = known[1].received
        self._took_s[f"{kind}/{fragment}"] = time.monotonic()
        self._words.append(pack(Fetch(kind=kind, fragment=fragment, version=version, offset=offset)))
        self._news.set()

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
        self._note_newest(content)
        newest, merged = self._newest[fragment]
        if self.values.versions[fragment] < newest:
            self._catch_up(fragment)
        else:
            self.values.arrive(fragment, merged)

    def _note_newest(self, content: Content) -> None:
        known = self._newest.get(content.fragment, (0, 0))
        if content.newest >= known[0]:
            self._newest[content.fragment] = content.newest, content.merged

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
        took_s = time.monotonic() - began_s
        self._ways_s[what.startswith("update/")].append(took_s)
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
