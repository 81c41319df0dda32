"""Calls another doctor and says how far it came: name, connection, answer, token, a payload larger than one packet.

The one idea: every stage that can fail between two hosts fails here first, under one deadline, and is named together
with the address, the port and the interface that were used.
"""

import os
import socket
import time
from typing import TypeVar

import msgspec

from ragtag.core.within import within
from ragtag.doctor.bounded import left_s
from ragtag.doctor.facts import Way
from ragtag.doctor.frames import (
    Echo,
    FrameError,
    Refused,
    Request,
    Target,
    TokenError,
    greet_listener,
    receive,
    send,
)
from ragtag.doctor.interfaces import interface_of, interfaces, plain, resolve, way_out

CALL_TIMEOUT_S = 3.5
"""Bounds one call, all stages together. An examination makes two, one after another, and must end within 10 s."""
_CONNECT_TIMEOUT_S = 3.0
"""Two lost packets: the kernel asks again after 1 s and after 2 s more."""
_RESOLVE_TIMEOUT_S = 2.0
_NUM_ROUND_TRIPS = 3
_BULK_BYTES = (1380, 64 << 10)
"""One packet of nearly the largest size, which no network card splits or joins on the way; then many of them, yet only
a second's worth over 1 Mbit/s."""

R = TypeVar("R", bound=msgspec.Struct)


class Conversation:
    """An open, proven connection to another doctor."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self._connection = connection
        self.host = host
        """What the other end calls itself."""

    @property
    def own_address(self) -> str:
        """This end's address."""
        return plain(str(self._connection.getsockname()[0]))

    def ask(self, request: Request, kind: type[R], *, timeout_s: float) -> R:
        """Return the reply, a `kind`.

        Raises:
            OSError: no reply in time, or the connection broke.
            FrameError: the reply is another one, or a refusal.
        """
        deadline_s = time.monotonic() + timeout_s
        send(self._connection, request, deadline_s=deadline_s)
        reply = receive(self._connection, kind | Refused, deadline_s=deadline_s)
        if isinstance(reply, Refused):
            raise FrameError(reply.why)
        return reply

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def call(
    source: str, target: Target, token: str, *, timeout_s: float = CALL_TIMEOUT_S
) -> tuple[Way, Conversation | None]:
    """Return how calling `target` went, and the conversation if it is ok; within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    way = Way(
        source=source,
        target=target.name,
        address=target.address,
        port=target.port,
        control=target.control,
        ok=False,
        stage="resolve",
    )
    try:
        address = within(min(_RESOLVE_TIMEOUT_S, timeout_s), lambda: resolve(target.address, target.port))[0]
    except (OSError, UnicodeError) as error:
        return msgspec.structs.replace(way, error=_words(error)), None
    known = interfaces()
    interface, own = way_out(address, known)
    way = msgspec.structs.replace(way, address=address, interface=interface, source_address=own, stage="connect")
    try:
        connection = socket.create_connection(
            (address, target.port), timeout=min(_CONNECT_TIMEOUT_S, left_s(deadline_s))
        )
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        return msgspec.structs.replace(way, error=_words(error), refused=refused), None
    own = plain(str(connection.getsockname()[0]))
    way = msgspec.structs.replace(way, source_address=own, interface=interface_of(own, known) or interface)
    return _talk(way, connection, token, deadline_s)


def _talk(way: Way, connection: socket.socket, token: str, deadline_s: float) -> tuple[Way, Conversation | None]:
    stage = "answer"
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        conversation = Conversation(connection, greet_listener(connection, token, deadline_s=deadline_s))
        round_trips_s = []
        for _ in range(_NUM_ROUND_TRIPS):
            begin_s = time.perf_counter()
            conversation.ask(Echo(""), Echo, timeout_s=left_s(deadline_s))
            round_trips_s.append(time.perf_counter() - begin_s)
        stage = "bulk"
        for size in _BULK_BYTES:
            conversation.ask(Echo("x" * size), Echo, timeout_s=left_s(deadline_s))
    except (OSError, FrameError, TokenError) as error:
        connection.close()
        stage = "token" if isinstance(error, TokenError) else stage
        return msgspec.structs.replace(way, stage=stage, error=_words(error)), None
    return msgspec.structs.replace(way, ok=True, stage="", latency_s=min(round_trips_s) / 2), conversation


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return error.strerror or str(error) or os.strerror(error.errno or 0)
    return str(error)
