"""Who comes in at the hub's port: the token, and bounds that hold whoever knocks.

The one idea: until a connection has said a valid Hello it is a stranger, and strangers share a fixed number of places;
a new one takes the place of the one that has dawdled longest, so that a flood cannot keep workers out.
"""

import asyncio
import hmac
import http
import logging
import socket
import time
from collections.abc import Callable, Mapping

import msgspec
from websockets.asyncio.server import Server, ServerConnection
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from ragtag.hub.connection import drop_unacknowledged


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub grants, whoever asks."""

    workers: int = 4096
    """Connections that have said Hello."""
    strangers: int = 256
    """Connections that have not, yet."""
    opening_s: float = 5.0
    """Seconds for the HTTP request, and again for the Hello."""
    queue_frames: int = 1024
    """Frames that wait for one worker to read them; beyond it the connection is dropped."""
    queue_bytes: int = 16 << 20
    frames_per_s: float = 200.0
    """Frames that are taken from one worker, after a burst of five times as many; more of them wait."""
    islands: int = 256
    """Connections of islands."""
    log_every_s: float = 1.0
    """Seconds between two lines about strangers and other trouble from outside."""


class SeldomLog:
    """Warnings about what others do, one line every `every_s` seconds at most, and how many there were besides."""

    def __init__(self, log: logging.Logger, *, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self._last_s: float | None = None
        self._kept: str = ""
        self._num_kept = 0

    def warn(self, text: str) -> None:
        """Write the line now, or count it."""
        self._kept, self._num_kept = text, self._num_kept + 1
        self.flush()

    def flush(self) -> None:
        """Write what was counted, where it is time; to be called now and then."""
        now_s = self._clock()
        if not self._num_kept or (self._last_s is not None and now_s - self._last_s < self._every_s):
            return
        more = f" (and {self._num_kept - 1} more like it)" if self._num_kept > 1 else ""
        self._log.warning("%s", one_line(self._kept) + more)
        self._last_s, self._kept, self._num_kept = now_s, "", 0


class Door:
    """Counts strangers, checks their token, and answers GET /health.

    Args:
        token: what a request must carry as `Authorization: Bearer`.
        health: makes the answer to GET /health, as JSON.
        num_workers: how many connections have said Hello.
        others: by path, whether one more connection is taken there.
        patience_s: for how long the kernel may leave bytes unacknowledged, in seconds.
    """

    def __init__(
        self,
        *,
        token: str,
        limits: Limits,
        health: Callable[[], bytes],
        num_workers: Callable[[], int],
        trouble: SeldomLog,
        patience_s: float,
        others: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        self._expected = f"Bearer {token}".encode()
        self._others = others or {}
        self._limits, self._health, self._num_workers = limits, health, num_workers
        self._trouble, self._patience_s = trouble, patience_s
        # In order of arrival, which a dict keeps and a set does not.
        self._strangers: dict[GuardedConnection, None] = {}
        self._answered: set[GuardedConnection] = set()
        """Strangers that got an HTTP answer and need no line in the log when they go."""

    def connection(
        self, protocol: ServerProtocol, server: Server, **settings: float | int | None
    ) -> "GuardedConnection":
        """Make the object for a new connection; what `websockets` calls."""
        return GuardedConnection(self, protocol, server, **settings)

    def came(self, connection: "GuardedConnection") -> None:
        """A connection was accepted."""
        if len(self._strangers) >= self._limits.strangers:
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.transport.abort()
            self._trouble.warn(
                f"a flood of connections: dropped one from {caller(oldest)} that had not said Hello; there are "
                f"{self._limits.strangers} like it"
            )
        self._strangers[connection] = None
        sock: socket.socket | None = connection.transport.get_extra_info("socket")
        if sock is not None:
            drop_unacknowledged(sock, self._patience_s)

    def went(self, connection: "GuardedConnection") -> None:
        """A connection ended."""
        if connection in self._strangers and connection not in self._answered:
            reason = "ended" if connection.request is None else "left"
            if connection.protocol.handshake_exc is not None and connection.request is None:
                reason = "sent no valid HTTP request, or none in time,"
            self._trouble.warn(f"a connection from {caller(connection)} {reason} before it had said Hello")
        self._forget(connection)

    def welcome(self, connection: "GuardedConnection") -> None:
        """A connection has said a valid Hello."""
        self._forget(connection)

    def close(self) -> None:
        """Drop all strangers."""
        for connection in list(self._strangers):
            self._forget(connection)
            connection.transport.abort()

    def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer an HTTP request; None: it may become a WebSocket."""
        given = request.headers.get_all("Authorization")
        # Always one comparison of the same kind, however wrong the request is.
        known = hmac.compare_digest("".join(given).encode("utf-8", "surrogateescape"), self._expected)
        if not known:
            self._trouble.warn(f"refused {caller(connection)}: {'wrong token' if given else 'no token'}")
            answer = connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong token\n")
            answer.headers["WWW-Authenticate"] = "Bearer"
        elif request.path == "/health":
            answer = connection.respond(http.HTTPStatus.OK, "")
            answer.body = self._health()
            for name, value in (("Content-Length", str(len(answer.body))), ("Content-Type", "application/json")):
                del answer.headers[name]
                answer.headers[name] = value
        elif request.path in self._others:
            if self._others[request.path]():
                return None
            self._trouble.warn(f"refused {caller(connection)}: too many connections for {request.path}")
            answer = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many of them\n")
        elif request.path != "/":
            answer = connection.respond(http.HTTPStatus.NOT_FOUND, "a ragtag hub has / and /health\n")
        elif self._num_workers() >= self._limits.workers:
            self._trouble.warn(f"refused {caller(connection)}: {self._limits.workers} workers are connected")
            answer = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many workers\n")
        else:
            return None
        if isinstance(connection, GuardedConnection):
            self._answered.add(connection)
        return answer

    def _forget(self, connection: "GuardedConnection") -> None:
        self._strangers.pop(connection, None)
        self._answered.discard(connection)


class GuardedConnection(ServerConnection):
    """A connection that tells the door when it comes and goes."""

    def __init__(self, door: Door, protocol: ServerProtocol, server: Server, **settings: float | int | None) -> None:
        super().__init__(protocol, server, **settings)  # pyright: ignore[reportArgumentType]  # as `serve` gives them
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        self._door.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        super().connection_lost(exc)
        self._door.went(self)


def caller(connection: ServerConnection) -> str:
    """Address and port of the other end."""
    name = connection.transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "an unknown address"


def one_line(text: str) -> str:
    """`text` as one line of at most 500 characters, whoever wrote it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:500])
