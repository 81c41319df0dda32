"""The hub as a network service: WebSocket frames in, the pure rules, their effects out, on one port and one thread.

The one idea: everything that happens is one event for `advance`, one at a time, and its effects are done in order; the
journal is synced before any frame leaves that makes a record visible. Nothing here decides who is in the run.
"""

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence

import msgspec
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from ragtag.core.errors import LaunchError
from ragtag.hub.connection import AwakeClock, silent_logger
from ragtag.hub.door import Door, GuardedConnection, Limits, SeldomLog, caller, one_line
from ragtag.hub.frames import FRAME_LIMIT_BYTES, End, Frame, FromWorker, Hello, Logged, encode, from_worker
from ragtag.hub.journal import Journal, JournalError
from ragtag.hub.peer import Pace, Peer
from ragtag.hub.relay import PATH as OUTER_PATH
from ragtag.hub.relay import Relay, stopped
from ragtag.hub.rules import advance
from ragtag.hub.rules_state import (
    CloseConnection,
    Closed,
    Event,
    HubState,
    JournalRecord,
    Log,
    Received,
    Restarted,
    Send,
    Tick,
)
from ragtag.hub.rules_state import Journal as ToJournal
from ragtag.hub.rules_suspicion import beat_s
from ragtag.watch.events import Said
from ragtag.watch.log_file import LogFile

log = logging.getLogger("ragtag.hub")

_LINGER_S = 1.0
"""How long the hub of a run that is over waits for workers that come late, to tell them so."""
_FAREWELL_S = 0.5
_INC_LIMIT = 255
_TICKS_IN_BEAT = 2
_LONGEST_GAP_BEATS = 2
_FROZEN_BEATS = 2
"""Beats that this process missed at a stretch, beyond the longest gap, after which it counts as frozen."""
_SILENT_PATIENCES = 2
"""Multiples of the patience after which a connection that says nothing is dropped; the rules have judged it by then."""


class HubServer:
    """Serves one run until it is told to stop, or its journal cannot be written.

    Args:
        state: as `rules.restore` returned it.
        journal: open for appending.
        token: what every connection must carry.
        clock: seconds that only ever grow.
        log_file: the run's event log; None: it has none.
        outer: Unix socket of the process that merges what islands send; None: there is none.
        tls: certificate and key for all who connect; None: connections are in the clear.
    """

    def __init__(
        self,
        *,
        state: HubState,
        journal: Journal[JournalRecord],
        token: str,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_file: LogFile | None = None,
        outer: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._state, self._journal, self._log_file = state, journal, log_file
        self._patience_s = state.settings.patience_s
        self._beat_s = beat_s(self._patience_s)
        self._limits = limits or Limits()
        self._clock = AwakeClock(longest_gap_s=_LONGEST_GAP_BEATS * self._beat_s, clock=clock)
        self._peers: dict[str, Peer] = {}
        self._missing: dict[str, str] = {}
        """Workers whose connection ended after this process was frozen, and why; they may just be coming back."""
        self._lenient_until_s = 0.0
        self._began_s = self._now()
        self._trouble = SeldomLog(log, every_s=self._limits.log_every_s)
        self._stopping = asyncio.Event()
        self._failed: JournalError | None = None
        self._encoded: tuple[Frame | None, bytes] = (None, b"")
        self._tls = tls
        most = self._limits.islands
        self._relay = None if outer is None else Relay(outer, most=most, write_lines=self._write_lines)
        self._door = Door(
            token=token,
            limits=self._limits,
            health=self._health,
            num_workers=lambda: len(self._peers),
            trouble=self._trouble,
            patience_s=self._patience_s,
            others={} if self._relay is None else {OUTER_PATH: self._relay.has_room},
        )

    def stop(self) -> None:
        """End `run`; only from its own loop."""
        self._stopping.set()

    async def run(self, listener: socket.socket) -> None:
        """Serve on `listener`, a bound socket, until `stop`.

        Raises:
            JournalError: a record could not be written; everybody connected was told that the run is over.
        """
        self._happen(Restarted())
        if self._failed is not None:
            raise self._failed
        host, port = listener.getsockname()[:2]
        server = await serve(
            self._talk,
            sock=listener,
            process_request=self._door.admit,
            create_connection=self._door.connection,  # pyright: ignore[reportArgumentType]  # only called
            compression=None,
            server_header="ragtag hub",
            open_timeout=self._limits.opening_s,
            close_timeout=_FAREWELL_S,
            ping_interval=None,
            max_size=FRAME_LIMIT_BYTES,
            logger=silent_logger(),
            ssl=self._tls,
        )
        log.debug("listening on %s port %d", host, port)
        ticker = asyncio.ensure_future(self._tick())
        keeping = None if self._relay is None else asyncio.ensure_future(self._relay.keep_log())
        try:
            await self._stopping.wait()
        finally:
            if keeping is not None:
                await stopped(keeping)
            ticker.cancel()
            await asyncio.wait({ticker})
            await self._part()
            server.close(code=1001, reason="the hub ends")
            await asyncio.sleep(0)
            # Nobody comes any more.
            self._door.close()
            await server.wait_closed()
            # Two rounds of the loop, in which connections that were dropped let go of their sockets.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if not ticker.cancelled() and ticker.exception() is not None:
            raise ticker.exception() or AssertionError
        if self._failed is not None:
            raise self._failed

    async def _tick(self) -> None:
        nobody_since_s: float | None = None
        try:
            while True:
                await asyncio.sleep(self._beat_s / _TICKS_IN_BEAT)
                self._happen(Tick())
                self._drop_silent()
                self._give_up_missing()
                self._trouble.flush()
                if self._state.end is None or self._peers or self._callers:
                    nobody_since_s = None
                    continue
                nobody_since_s = nobody_since_s or self._now()
                if self._now() - nobody_since_s > _LINGER_S:
                    log.info("nobody needs this hub any more")
                    self.stop()
                    return
        except Exception:
            self.stop()
            raise

    def _now(self) -> float:
        """The hub's time; workers left a hub that was frozen, and get time to come back."""
        missed_s = self._clock.missed_s
        now_s = self._clock()
        if self._clock.missed_s - missed_s > _FROZEN_BEATS * self._beat_s:
            log.warning("the hub itself was frozen for %.3g s", self._clock.missed_s - missed_s)
            self._lenient_until_s = now_s + self._patience_s / 2
        return now_s

    def _miss(self, inc: str, reason: str) -> None:
        """A worker's connection has ended."""
        if self._stopping.is_set():
            return
        if self._now() < self._lenient_until_s:
            self._missing[inc] = reason
        else:
            self._happen(Closed(inc=inc, reason=reason))

    def _give_up_missing(self) -> None:
        if self._missing and self._now() >= self._lenient_until_s:
            missing, self._missing = self._missing, {}
            for inc, reason in missing.items():
                self._happen(Closed(inc=inc, reason=reason))

    def _drop_silent(self) -> None:
        longest_s = _SILENT_PATIENCES * self._patience_s
        for peer in self._peers.values():
            silent_s = self._now() - peer.heard_s
            if silent_s > longest_s:
                peer.abort(f"nothing came on its connection for {silent_s:.3g} s")

    async def _part(self) -> None:
        """Let what is queued leave, briefly."""
        peers = list(self._peers.values())
        for peer in peers:
            peer.finish("the hub ends")
        waits = [asyncio.ensure_future(peer.connection.wait_closed()) for peer in peers]
        if waits:
            await asyncio.wait(waits, timeout=_FAREWELL_S)
        for wait in waits:
            wait.cancel()
        for peer in peers:
            peer.abort("the hub ends")

    @property
    def _callers(self) -> Sequence[str]:
        """Islands that are connected."""
        return () if self._relay is None else self._relay.callers

    # One connection

    async def _talk(self, connection: ServerConnection) -> None:
        assert isinstance(connection, GuardedConnection)
        if self._relay is not None and connection.request is not None and connection.request.path == OUTER_PATH:
            self._door.welcome(connection)
            await self._relay.pass_on(connection, caller(connection))
            return
        hello = await self._opening(connection)
        if hello is None:
            return
        inc = hello.member.inc
        self._missing.pop(inc, None)
        peer = Peer(connection, inc, self._limits, heard_s=self._now())
        older = self._peers.pop(inc, None)
        if older is not None:
            # A broken link that only the worker has noticed so far.
            older.abort("a newer connection has replaced it")
        self._peers[inc] = peer
        self._door.welcome(connection)
        delivery = asyncio.ensure_future(peer.deliver(self._patience_s))
        reason = "its connection closed"
        try:
            self._happen(Received(inc=inc, frame=hello))
            reason = await self._listen(peer)
        except Exception:
            # The state is a value, so it is as whole as before; whoever sent that frame has to come again.
            log.exception("a frame from %s could not be handled", caller(connection))
        finally:
            delivery.cancel()
            await asyncio.wait({delivery})
            if self._peers.get(inc) is peer:
                del self._peers[inc]
                self._miss(inc, reason)

    async def _opening(self, connection: GuardedConnection) -> Hello | None:
        """The first frame, where it is a Hello and comes in time."""
        try:
            async with asyncio.timeout(self._limits.opening_s):
                frame = _read(await connection.recv())
        except (TimeoutError, ConnectionClosed):
            return None
        except msgspec.DecodeError as error:
            await self._refuse(connection, f"the first frame is none of ragtag's ({error})")
            return None
        if not isinstance(frame, Hello) or not 0 < len(frame.member.inc) <= _INC_LIMIT:
            await self._refuse(connection, "the first frame is no Hello")
            return None
        return frame

    async def _listen(self, peer: Peer) -> str:
        """Hand the worker's frames to the rules until the connection ends; return why it ended."""
        pace = Pace(self._limits.frames_per_s, time.monotonic)
        while True:
            try:
                frame = _read(await peer.connection.recv())
            except ConnectionClosed:
                return peer.dropped or "its connection closed"
            except msgspec.DecodeError as error:
                await self._refuse(peer.connection, f"a frame is none of ragtag's ({error})")
                return "it sent what is no frame of ragtag's"
            if (frame.member.inc if isinstance(frame, Hello) else frame.inc) != peer.inc:
                await self._refuse(peer.connection, "a frame names another worker than the Hello")
                return "it spoke for another worker"
            if self._peers.get(peer.inc) is not peer:
                return "a newer connection has replaced it"
            peer.heard_s = self._now()
            if isinstance(frame, Logged):
                self._write_lines([bytes(line) for line in frame.lines])
                continue
            self._happen(Received(inc=peer.inc, frame=frame))
            wait_s = pace.wait_s()
            if wait_s:
                self._trouble.warn(f"{caller(peer.connection)} sends more than {self._limits.frames_per_s:g} frames/s")
                await asyncio.sleep(wait_s)

    async def _refuse(self, connection: ServerConnection, reason: str) -> None:
        self._trouble.warn(f"closed the connection from {caller(connection)}: {reason}")
        await connection.close(1008, one_line(reason)[:100])

    # The rules

    def _happen(self, event: Event) -> None:
        """Let the rules take in `event` and do what they say, in order."""
        if self._failed is not None:
            return
        before = self._state
        self._state, effects = advance(before, event, self._now())
        for effect in effects:
            if isinstance(effect, ToJournal):
                try:
                    self._journal.append(effect.record)
                except JournalError as error:
                    # What the rules decided is unwritten, so nobody may see it.
                    self._state = before
                    self._fail(error)
                    return
            elif isinstance(effect, Send):
                self._send(effect.inc, effect.frame)
            elif isinstance(effect, CloseConnection):
                peer = self._peers.get(effect.inc)
                if peer is not None:
                    peer.finish(effect.reason)
            else:
                self._say(effect)

    def _send(self, inc: str, frame: Frame) -> None:
        peer = self._peers.get(inc)
        if peer is None:
            return
        if self._encoded[0] is not frame:
            # The same frame often goes to everybody.
            self._encoded = (frame, encode(frame))
        if not peer.send(self._encoded[1]):
            self._trouble.warn(f"dropped the connection from {caller(peer.connection)}: it does not read")

    def _say(self, effect: Log) -> None:
        text = one_line(effect.text)
        log.log(getattr(logging, effect.level.upper()), "%s", text)
        if effect.level != "debug":
            self._write_lines([msgspec.json.encode(Said(t=time.time(), level=effect.level, text=text, source="hub"))])

    def _write_lines(self, lines: list[bytes]) -> None:
        """Into the run's event log; who trains does not depend on it."""
        if self._log_file is None:
            return
        try:
            self._log_file.append([line for line in lines if b"\n" not in line])
        except OSError as error:
            self._trouble.warn(f"the run's log {self._log_file.path} cannot be written: {error.strerror}")

    def _fail(self, error: JournalError) -> None:
        self._failed = error
        checkpoint = self._state.checkpoint
        last = f"The last checkpoint is '{checkpoint}'" if checkpoint else "There is no checkpoint"
        end = End(reason=f"The hub on {socket.gethostname()} cannot go on: {error} {last}.", failed=True)
        for inc in list(self._peers):
            self._send(inc, end)
        self.stop()

    def _health(self) -> bytes:
        state = self._state
        return msgspec.json.encode(
            {
                "run": state.settings.run,
                "pid": os.getpid(),
                "up_s": round(self._now() - self._began_s, 3),
                "epoch": state.epoch,
                "generation": state.go.generation if state.go is not None else 0,
                "members": [
                    {"inc": each.inc, "name": each.name, "host": each.host, "rank": rank}
                    for rank, each in enumerate(state.go.members if state.go is not None else ())
                ],
                "connected": sorted([*self._peers, *self._callers]),
                "preparing": state.preparing.generation if state.preparing is not None else 0,
                "checkpoint": state.checkpoint,
                "end": state.end.reason if state.end is not None else "",
            }
        )


def listen_on(address: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: the system chooses one.

    Raises:
        LaunchError: `address` is none of this machine's, or the port is taken.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"The hub's address '{address}' means nothing here: {error.strerror}.") from error
    try:
        # A restarted hub takes its port back at once, though old connections are still being forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"The hub cannot listen on {address} port {port}: {error.strerror}. Name an address of this machine and a "
            "free port: --address, --port."
        ) from error
    return listener


def _read(message: str | bytes) -> FromWorker | Logged:
    try:
        return from_worker(message)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
