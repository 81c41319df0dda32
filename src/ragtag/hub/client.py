"""The worker's end of the hub: one daemon thread that keeps a connection, however often it breaks.

The one idea: what arrives is handed over on that thread, what is sent is queued and never blocks, and whether the hub
can be heard is a number of seconds; so the training thread is never held up by the hub, only told.
"""

import asyncio
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus, WebSocketException

from ragtag.core.errors import LaunchError, RagtagError
from ragtag.hub.connection import AwakeClock, check_token, client_tls, drop_unacknowledged, first_to_end, silent_logger
from ragtag.hub.frames import (
    FRAME_LIMIT_BYTES,
    Beat,
    Frame,
    FromHub,
    Hello,
    Logged,
    Refused,
    Welcome,
    encode,
    from_hub,
)
from ragtag.hub.mailbox import QUEUE_LIMIT, Mailbox
from ragtag.hub.rules_limits import TEXT_LIMIT, cut
from ragtag.hub.rules_suspicion import beat_s

F = TypeVar("F", bound=Frame)

_SILENT_BEATS = 5
"""Beats without an answer after which a connection is given up."""
_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 0.5
_LONGEST_OPENING_S = 5.0
_FAREWELL_S = 0.5
_NO_SOCKET = (-1, 0)
_LINES_LIMIT = 64


class HubClient:
    """Connects at once and again whenever the connection breaks, until closed or refused.

    Frames that were under way when a connection broke are lost, as are beats in the meantime; whoever sent one that
    matters learns from the next `Prep` that the world has moved on. `on_frame` and `beat` are called on the client's
    thread and must not block. A token that the hub does not know is told as a `Refused` frame, too.

    Args:
        address: of the hub, a name or a number.
        port: of the hub.
        token: what the hub was started with; RAGTAG_TOKEN in messages.
        hello: the first frame of each connection, made anew each time; its `inc` stays the same.
        patience_s: from which beats and time-outs are derived, in seconds.
        beat: makes the sign of life, every tenth of the patience, 2 s at most.
        on_frame: told of each frame, in order; None: they wait for `wait` only.
        clock: seconds that only ever grow.
        jitter: a number from 0 to 1, so that not all workers come back to a restarted hub in the same moment.

    Raises:
        SettingError: the token is empty or cannot be sent.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        hello: Callable[[], Hello],
        *,
        patience_s: float,
        beat: Callable[[], Beat],
        on_frame: Callable[[FromHub], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.address, self.port = address, port
        check_token(token)
        self._token, self._hello, self._beat = token, hello, beat
        self._tls = client_tls(os.environ.get("RAGTAG_TLS", ""))
        self._beat_s = beat_s(patience_s)
        self._patience_s, self._clock, self._jitter = patience_s, clock, jitter
        self._mailbox = Mailbox(on_frame)
        self._outbox: deque[bytes] = deque(maxlen=QUEUE_LIMIT)
        self._lines: deque[bytes] = deque(maxlen=_LINES_LIMIT)
        """Frames with lines of the event log, which leave when nothing else has to."""
        self._heard_s = clock()
        # Frozen and woken again, this process has not been left by a hub that it could not hear.
        self._awake = AwakeClock(longest_gap_s=2 * self._beat_s, clock=clock)
        self._heard_awake_s = self._awake()
        # Read by other threads as well, so that it goes on where only this client's is held up.
        self._process_awake = AwakeClock(longest_gap_s=2 * self._beat_s, clock=clock)
        self._heard_process_awake_s = self._process_awake()
        self._connected = False
        self._trouble = "no connection was made yet"
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._socket = _NO_SOCKET
        self._welcomed = False
        self._thread = threading.Thread(target=self._run, name="ragtag-hub", daemon=True)
        _forget_in_forked_children(self)
        self._thread.start()

    @property
    def error(self) -> RagtagError | None:
        """Why this client has given up for good; None: it has not."""
        return self._mailbox.error

    @property
    def lost_for_s(self) -> float:
        """Seconds since the hub was last heard in which this process was running; 0 while it answers."""
        silent_s = self._process_awake() - self._heard_process_awake_s
        return 0.0 if self._connected and silent_s < _SILENT_BEATS * self._beat_s else silent_s

    @property
    def heard_ago_s(self) -> float:
        """Seconds since the hub was last heard, by a clock that goes on while this process is frozen."""
        return self._clock() - self._heard_s

    def lost_error(self) -> LaunchError:
        """What to raise where the hub has been lost for too long."""
        return LaunchError(
            f"The hub at {self.address}:{self.port} has not been heard for {self._clock() - self._heard_s:.3g} s "
            f"(patience_s={self._patience_s:g}): {self._trouble}. Does it run there, and does a firewall let port "
            f"{self.port} through? `ragtag launch` on the first machine prints the line to type on this one."
        )

    def send(self, frame: Frame) -> None:
        """Queue a frame; from any thread, never blocks. It leaves as soon as there is a connection.

        Texts longer than the hub's limit are cut.
        """
        data = encode(_within_limits(frame))
        assert len(data) <= FRAME_LIMIT_BYTES, f"a {type(frame).__name__} of {len(data)} bytes"
        self._outbox.append(data)
        self._wake(self._news)

    def send_lines(self, inc: str, lines: Sequence[bytes]) -> None:
        """Queue lines of the event log; where the hub is away for long, the oldest are lost."""
        self._lines.append(encode(Logged(inc=inc, lines=tuple(map(msgspec.Raw, lines)))))
        self._wake(self._news)

    def wait(self, *kinds: type[F], timeout_s: float) -> F | None:
        """Take the oldest frame of one of `kinds`, leaving all others; None: none came within `timeout_s` seconds.

        Raises:
            LaunchError: the hub refused the token or this worker.
            RagtagError: the client's thread ended by a mistake in a callback.
        """
        return self._mailbox.wait(*kinds, timeout_s=timeout_s)

    def close(self, flush_s: float = 1.0) -> bool:
        """Send what is queued if that takes at most `flush_s` seconds, and end; return whether the thread ended."""
        own = threading.current_thread() is self._thread
        self._closing = True
        self._wake(self._news)
        if self._connected and not own:
            self._thread.join(flush_s)
        self._wake(self._over)
        if not own:
            self._thread.join(2 * _FAREWELL_S + 1.0)
        return not self._thread.is_alive()

    def _wake(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            # The loop has ended, and with it everybody who waits for events.
            pass

    # On the client's thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep_connected())
        except RagtagError as error:
            self._mailbox.fail(error)
        except BaseException as error:
            ended = LaunchError(f"ragtag's connection to the hub at {self.address}:{self.port} ended: {error!r}.")
            ended.__cause__ = error
            self._mailbox.fail(ended)
        finally:
            self._connected = False
            self._loop.close()

    async def _keep_connected(self) -> None:
        over = asyncio.ensure_future(self._over.wait())
        ticker = asyncio.ensure_future(self._tick())
        delay_s = _FIRST_DELAY_S
        try:
            while not over.done():
                attempt = asyncio.ensure_future(self._connect_once())
                await asyncio.wait({attempt, over}, return_when=asyncio.FIRST_COMPLETED)
                if not attempt.done():
                    attempt.cancel()
                    await asyncio.wait({attempt})
                    return
                if attempt.result():
                    delay_s = _FIRST_DELAY_S
                if self._closing:
                    return
                await asyncio.wait({over}, timeout=delay_s * (0.5 + self._jitter()))
                delay_s = min(2 * delay_s, _LAST_DELAY_S)
        finally:
            over.cancel()
            ticker.cancel()
            # Two rounds of the loop, in which transports that were told to close let go of their sockets.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _tick(self) -> None:
        """Read the clock that stops with the process, however seldom the training thread asks."""
        while True:
            self._process_awake()
            await asyncio.sleep(self._beat_s)

    async def _connect_once(self) -> bool:
        """Connect and talk until the connection breaks; return whether the hub had welcomed this worker."""
        self._welcomed = False
        connection = None
        try:
            async with connect(
                "ws://hub/" if self._tls is None else "wss://hub/",
                # Not in the address above, which would need IPv6 numbers in brackets.
                host=self.address,
                port=self.port,
                **({} if self._tls is None else {"ssl": self._tls, "server_hostname": self.address}),
                additional_headers={"Authorization": f"Bearer {self._token}"},
                proxy=None,
                compression=None,
                open_timeout=min(self._patience_s / 2, _LONGEST_OPENING_S),
                close_timeout=_FAREWELL_S,
                ping_interval=None,
                max_size=FRAME_LIMIT_BYTES,
                logger=silent_logger(),
            ) as connection:
                await self._talk(connection)
        except InvalidStatus as error:
            self._trouble = f"it answered with HTTP status {error.response.status_code}"
            if error.response.status_code in (401, 403):
                raise self._refused(Refused(reason=self._wrong_token())) from None
        except (OSError, WebSocketException, msgspec.DecodeError) as error:
            # TimeoutError is an OSError.
            self._trouble = _described(error)
        finally:
            self._connected = False
            self._socket = _NO_SOCKET
            if connection is not None:
                # Cancelled while it said goodbye, it would stay open.
                connection.transport.abort()
        return self._welcomed

    async def _talk(self, connection: ClientConnection) -> None:
        sock = connection.transport.get_extra_info("socket")
        self._socket = sock.fileno(), os.fstat(sock.fileno()).st_ino
        drop_unacknowledged(sock, self._patience_s)
        with self._callback("hello"):
            hello = self._hello()
        await connection.send(encode(hello))
        # The pulse first: where it has cut a dead connection, the others only know that it broke.
        await first_to_end(self._pulse(connection), self._receive(connection), self._deliver(connection))

    async def _receive(self, connection: ClientConnection) -> None:
        async for message in connection:
            frame = from_hub(message)
            self._note_heard()
            if isinstance(frame, Welcome):
                self._welcomed = self._connected = True
                self._news.set()
            if isinstance(frame, Refused):
                raise self._refused(frame)
            with self._callback("on_frame"):
                self._mailbox.put(frame)
        self._trouble = f"it closed the connection ({connection.close_reason or connection.close_code})"

    async def _deliver(self, connection: ClientConnection) -> None:
        while True:
            self._news.clear()
            while self._connected and (box := self._outbox or self._lines):
                data = box[0]
                await connection.send(data)
                # When full it may have dropped this one meanwhile.
                if box and box[0] is data:
                    box.popleft()
            if self._closing:
                self._over.set()
            await self._news.wait()

    async def _pulse(self, connection: ClientConnection) -> None:
        opened_s = self._awake()
        while True:
            asyncio.ensure_future(await connection.ping()).add_done_callback(self._note_answer)
            if self._connected:
                with self._callback("beat"):
                    beat = self._beat()
                await connection.send(encode(beat))
            await asyncio.sleep(self._beat_s)
            if self._awake() - max(self._heard_awake_s, opened_s) > _SILENT_BEATS * self._beat_s:
                connection.transport.abort()
                raise TimeoutError("it is connected but does not answer")

    def _note_answer(self, answer: "asyncio.Future[float]") -> None:
        # A hub that answers pings but does not welcome anybody is no hub.
        if not answer.cancelled() and answer.exception() is None and self._connected:
            self._note_heard()

    def _note_heard(self) -> None:
        self._heard_s, self._heard_awake_s = self._clock(), self._awake()
        self._heard_process_awake_s = self._process_awake()

    def _wrong_token(self) -> str:
        return (
            f"the token in RAGTAG_TOKEN is not the one that the hub at {self.address}:{self.port} was started with. "
            "Copy the whole line that `ragtag launch` printed on the first machine, or type "
            "`export RAGTAG_TOKEN=...` with its token"
        )

    def _refused(self, frame: Refused) -> LaunchError:
        error = LaunchError(
            f"The hub at {self.address}:{self.port} does not take this worker: {frame.reason.rstrip('.')}."
        )
        # Before the frame is handed over, so that whoever it wakes finds the reason.
        self._mailbox.error = error
        with self._callback("on_frame"):
            self._mailbox.put(frame)
        return error

    @contextmanager
    def _callback(self, name: str):
        """Tell a mistake in a callback from a broken connection, after which everything would just be tried again."""
        try:
            yield
        except Exception as error:
            raise RagtagError(
                f"ragtag's own `{name}`, called on the thread towards the hub, failed: {error!r}."
            ) from error


def _within_limits(frame: Frame) -> Frame:
    texts = {name: getattr(frame, name, "") for name in ("text", "reason")}
    long = {name: cut(text) for name, text in texts.items() if len(text) > TEXT_LIMIT}
    return msgspec.structs.replace(frame, **long) if long else frame


def _described(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, ConnectionClosedError) and error.rcvd is None:
        return "the connection broke"
    if isinstance(error, TimeoutError) and not error.args:
        return "it did not answer in time"
    return str(error) or type(error).__name__


_clients: "weakref.WeakSet[HubClient]" = weakref.WeakSet()
_registered = False


def _forget_in_forked_children(client: HubClient) -> None:
    """A forked child, such as a loader's worker, must not keep the connection open when this process dies."""
    global _registered
    _clients.add(client)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_in_child)


def _close_in_child() -> None:
    for client in list(_clients):
        (fd, inode), client._socket = client._socket, _NO_SOCKET
        try:
            # The parent may just have closed it, and the number be another file's.
            if fd >= 0 and os.fstat(fd).st_ino == inode:
                os.close(fd)
        except OSError:
            pass
