"""Votes and gathers over plain sockets between all pairs of ranks, driven by the thread that wants the answers.

The one idea: nothing here ever blocks but one selector, which hears peers and `Bell` alike; so the calling thread
sends, receives and can be told, without handing over to another thread.
"""

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Protocol

from ragtag.comm.bell import Bell
from ragtag.comm.frame import Frame, FrameError, FrameReader, encode, kind_of
from ragtag.comm.transport import TransportError

_CHUNK_BYTES = 1 << 18

Delay = Callable[[int, int], float]
"""(peer, number of bytes) -> seconds until a message handed over now leaves; how slow links are emulated."""


class Riders(Protocol):
    """What rides along with frames."""

    def aside(self, peer: int, /) -> bytes:
        """What goes with a frame to `peer` that is handed over now; empty: nothing."""
        ...

    def heard(self, peer: int, aside: bytes, /) -> None:
        """What came with a frame of `peer`, just now."""
        ...


class _Connection:
    """One peer: its socket, what has come early, and what has still to leave, with the time when it may."""

    __slots__ = ("early", "outgoing", "peer", "reader", "stream", "writing")

    def __init__(self, peer: int, stream: socket.socket) -> None:
        self.peer = peer
        self.stream = stream
        self.reader = FrameReader()
        self.early: deque[Frame] = deque()
        self.outgoing: deque[tuple[float, memoryview]] = deque()
        self.writing = False
        """Whether the selector watches for room to write."""


class SocketMesh:
    """This rank's connections with all others, and one call at a time over them: `begin`, `advance` until it is
    `complete`, `finish`.

    Every rank makes the same calls in the same order; where one does not, `differs` says so. One thread uses it.

    Args:
        rank: this end's.
        sockets: a connected stream socket for each other rank; the mesh owns them from now on.
        bell: ends an `advance` when rung.
        delay_s: how much later a message leaves, in seconds; None: at once.
        clock: seconds; the one of `delay_s`'s links.
        riders: what rides along; None: nothing.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        bell: Bell,
        *,
        delay_s: Delay | None = None,
        clock: Callable[[], float] = time.monotonic,
        riders: Riders | None = None,
    ) -> None:
        self.rank = rank
        self.num_begun = 0
        self.num_finished = 0
        self.answers: dict[int, Frame] = {}
        """What has come of the current call, by rank, with this rank's own part."""
        self._bell = bell
        self._delay_s = delay_s
        self._clock = clock
        self._riders = riders
        self._connections = {peer: _Connection(peer, sockets[peer]) for peer in sorted(sockets)}
        self._missing: set[int] = set()
        self._unsent: set[int] = set()
        self._broken: dict[int, TransportError] = {}
        # Where the due time of a message matters, epoll's milliseconds are too coarse.
        self._selector = selectors.DefaultSelector() if delay_s is None else selectors.SelectSelector()
        self._selector.register(bell, selectors.EVENT_READ, None)
        for connection in self._connections.values():
            connection.stream.setblocking(False)
            self._selector.register(connection.stream, selectors.EVENT_READ, connection)

    @staticmethod
    def local(world_size: int, *, delay_s: Delay | None = None) -> list["SocketMesh"]:
        """Return the ends of a mesh within this process, for tests: rank r's end for a thread of its own."""
        pairs = {ranks: socket.socketpair() for ranks in combinations(range(world_size), 2)}
        return [
            SocketMesh(
                rank,
                {sum(ranks) - rank: pair[ranks.index(rank)] for ranks, pair in pairs.items() if rank in ranks},
                Bell(),
                delay_s=delay_s,
            )
            for rank in range(world_size)
        ]

    @property
    def complete(self) -> bool:
        """Whether every rank's part has come and this rank's has left."""
        return not self._missing and not self._unsent

    @property
    def differs(self) -> bool:
        """Whether a rank is known to make another call."""
        kind = self.answers[self.rank].kind
        return any(answer.kind != kind for answer in self.answers.values())

    @property
    def error(self) -> TransportError | None:
        """Why the current call can't complete, if a connection that it needs is broken."""
        for peer, error in self._broken.items():
            if peer in self._missing or peer in self._unsent:
                return error
        return None

    def begin(self, call: str, doing: str, payload: bytes) -> int:
        """Start the next call by sending `payload` to every rank, and return its number, from 1.

        Args:
            call: what must be alike on all ranks.
            doing: what people are told that this rank does.
            payload: at most `frame.PAYLOAD_LIMIT_BYTES`.
        """
        self.num_begun += 1
        frame = Frame(self.num_begun, kind_of(call), doing, payload)
        plain = memoryview(encode(frame))
        self.answers = {self.rank: frame}
        self._missing, self._unsent = set(self._connections), set(self._connections)
        for peer, connection in self._connections.items():
            if connection.early:
                self._take(connection, connection.early.popleft())
            if self._riders is not None and (aside := self._riders.aside(peer)):
                content = memoryview(encode(frame._replace(aside=aside)))
            else:
                content = plain
            due_s = self._clock() + self._delay_s(peer, len(content)) if self._delay_s is not None else 0.0
            connection.outgoing.append((due_s, content))
            self._send(connection)
        return self.num_begun

    def advance(self, timeout_s: float) -> bool:
        """Send and receive what can be; wait for at most `timeout_s` seconds if that is nothing and no bell rings.

        Returns whether the call came nearer to its end by a rank's whole part, with no news to look at: so at most
        once for each rank.
        """
        num_missing, news = len(self._missing), False
        if self._delay_s is not None:
            now_s = self._clock()
            waiting = [each.outgoing[0][0] for each in self._connections.values() if each.outgoing and not each.writing]
            timeout_s = max(0.0, min([timeout_s, *(due_s - now_s for due_s in waiting)]))
        for key, events in self._selector.select(timeout_s):
            connection = key.data
            if connection is None:
                self._bell.hush()
                news = True
                continue
            if events & selectors.EVENT_READ:
                self._receive(connection)
            if events & selectors.EVENT_WRITE:
                self._send(connection)
        if self._delay_s is not None:
            for connection in self._connections.values():
                if connection.outgoing and not connection.writing:
                    self._send(connection)
        return len(self._missing) < num_missing and not news

    def finish(self) -> tuple[bytes, ...]:
        """End a call that is complete, and return every rank's payload, by rank."""
        assert self.complete, f"call {self.num_begun} is not complete"
        self.num_finished += 1
        return tuple(self.answers[rank].payload for rank in sorted(self.answers))

    def close(self) -> None:
        """Close all connections; peers see their ends broken. May be called twice."""
        for connection in self._connections.values():
            self._break(connection, TransportError(f"rank {self.rank} closed its connections", peer=self.rank))
        self._selector.close()

    def _send(self, connection: _Connection) -> None:
        """Send what is due, as far as there is room."""
        if connection.peer in self._broken:
            return
        outgoing = connection.outgoing
        full = False
        try:
            while outgoing and not full and (self._delay_s is None or outgoing[0][0] <= self._clock()):
                due_s, content = outgoing.popleft()
                num_sent = 0
                try:
                    num_sent = connection.stream.send(content)
                except BlockingIOError:
                    pass
                full = num_sent < len(content)
                if full:
                    outgoing.appendleft((due_s, content[num_sent:]))
        except OSError as error:
            self._lose(connection, f"sending to rank {connection.peer}: {error.strerror}")
            return
        if not outgoing:
            self._unsent.discard(connection.peer)
        if full != connection.writing:
            connection.writing = full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if full else 0)
            self._selector.modify(connection.stream, events, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            content = connection.stream.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, f"receiving from rank {connection.peer}: {error.strerror}")
            return
        if not content:
            self._lose(connection, f"receiving from rank {connection.peer}: closed by peer")
            return
        try:
            frames = connection.reader.feed(content)
        except FrameError as error:
            self._lose(connection, f"receiving from rank {connection.peer}: {error}")
            return
        for frame in frames:
            if self._riders is not None and frame.aside:
                self._riders.heard(connection.peer, frame.aside)
            if connection.peer in self._missing:
                self._take(connection, frame)
            else:
                connection.early.append(frame)

    def _take(self, connection: _Connection, frame: Frame) -> None:
        if frame.number != self.num_begun:
            self._lose(connection, f"rank {connection.peer} is at call {frame.number} instead of {self.num_begun}")
            return
        self._missing.discard(connection.peer)
        self.answers[connection.peer] = frame

    def _lose(self, connection: _Connection, text: str) -> None:
        self._break(connection, TransportError(text, peer=connection.peer))

    def _break(self, connection: _Connection, error: TransportError) -> None:
        if connection.peer in self._broken:
            return
        self._broken[connection.peer] = error
        # A closed connection is readable for ever, which would keep the selector awake.
        self._selector.unregister(connection.stream)
        connection.stream.close()
        connection.outgoing.clear()
