"""An island's connection to the outer loop: one daemon thread that sends, fetches, and comes back whenever it breaks.

The one idea: the training thread only hands over a snapshot and takes what has arrived; encoding, decoding and all
waits are on this thread. What is said on a connection, and what outlives it, is `Talk`'s.
"""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import torch
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from ragtag.core.errors import LaunchError, RagtagError
from ragtag.hub.connection import check_token, client_tls, drop_unacknowledged, first_to_end, silent_logger
from ragtag.hub.frames import FRAME_LIMIT_BYTES
from ragtag.hub.relay import PATH
from ragtag.outer.codec import WorthlessDelta
from ragtag.outer.protocol import Attach, Beat, Detach, Reading
from ragtag.outer.talk import Talk
from ragtag.outer.transfer import TransferError

_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 2.0
_FAREWELL_S = 0.5
_LONGEST_OPENING_S = 10.0


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
        self._token, self._patience_s = token, patience_s
        self._tls = client_tls(os.environ.get("RAGTAG_OUTER_TLS", ""))
        self.talk = Talk(attach, where=f"{address}:{port}")
        """Touched under `lock` only, but for what is a single number or word."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.error: RagtagError | None = None
        """Why it has given up for good; None: it has not."""
        self.said_finished = False
        """Whether the hub knows that nothing more comes."""
        self._beat = Beat(step=attach().step)
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ragtag-outer", daemon=True)
        self._thread.start()

    # For the training thread

    @property
    def connected(self) -> bool:
        """Whether the hub answers."""
        return self.talk.open

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
            if not self.talk.values.reserve(fragment):
                return False
        own = take()
        self._call(lambda: self.talk.send(fragment, own, **about))
        return True

    def give(self, values: Sequence[torch.Tensor], state: bytes, *, step: int) -> None:
        """Send the values that all islands begin with, and what else newcomers need."""
        with self.lock:
            self.talk.give(values, state, step=step)
        self._call(lambda: None)

    def fetch_all(self, *, state: bool = True) -> None:
        """Bring all values as they are now, and the state; `values.begun` and `state` say that they are here."""
        if not self.talk.fetching:
            self.talk.fetching = True
            self._call(lambda: self.talk.fetch_all(state=state))

    def say(self, frame: Reading | Detach | Beat) -> None:
        """Queue a frame; it is lost where the connection breaks first."""
        self._call(lambda: self.talk.say(frame))

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

    def _call(self, action: Callable[[], object]) -> None:
        def acting() -> None:
            with self.lock:
                action()
            self._news.set()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(acting)

    # On the client's thread

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
            self.talk.end()
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
            self.talk.trouble = f"it answered with HTTP status {status}"
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
            self.talk.trouble = str(error) or type(error).__name__
        finally:
            taken = self.talk.open
            self.talk.end()
            if connection is not None:
                connection.transport.abort()
            with self.changed:
                self.changed.notify_all()
        return taken

    async def _talk(self, connection: ClientConnection) -> None:
        with self.lock:
            first = self.talk.begin()
        await connection.send(first)
        await first_to_end(self._receive(connection), self._deliver(connection), self._pulse())

    async def _pulse(self) -> None:
        every_s = min(self._patience_s / 10, 2.0)
        while True:
            await asyncio.sleep(every_s)
            if self.talk.open:
                self.talk.say(self._beat)
                self._news.set()

    async def _deliver(self, connection: ClientConnection) -> None:
        while True:
            self._news.clear()
            with self.lock:
                message, idle = self.talk.next_message(), self.talk.idle
            if message is not None:
                await connection.send(message)
            elif self._closing and idle:
                return
            else:
                await self._news.wait()

    async def _receive(self, connection: ClientConnection) -> None:
        async for message in connection:
            with self.changed:
                self.talk.heard(message if isinstance(message, bytes) else message.encode())
                self.changed.notify_all()
            self._news.set()
        self.talk.trouble = f"it closed the connection ({connection.close_reason or connection.close_code})"
