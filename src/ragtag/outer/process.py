"""The outer process: merges what islands send, behind the hub's port, and may be killed at any moment.

The one idea: the hub passes messages on and knows nothing of them; this process has torch, the values and the disk. Its
socket is the launcher's, so whoever comes while it is started again waits instead of being turned away.
"""

import argparse
import asyncio
import ctypes
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ragtag.core.errors import RagtagError
from ragtag.hub.frames import FRAME_LIMIT_BYTES
from ragtag.hub.journal import JournalError
from ragtag.hub.relay import LENGTH, Introduction
from ragtag.outer.service import Service
from ragtag.outer.session import Session
from ragtag.outer.store import Store, StoreError
from ragtag.watch.events import Event

JOURNAL_STATUS = 74
_OPENING_S = 10.0
_FAREWELL_S = 1.0
_BUFFER_BYTES = 1 << 18
_LINES_LIMIT = 10_000
_TICKS_PER_S = 20.0
_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


class OuterServer:
    """Carries messages between connections of the hub and a `Service`.

    Args:
        store: of the run.
        run, version, patience_s: as `Service` takes them.
    """

    def __init__(self, store: Store, *, run: str, version: str, patience_s: float) -> None:
        self.service = Service(store, run=run, version=version, patience_s=patience_s, tell=self._tell)
        self._tick_s = min(1 / _TICKS_PER_S, patience_s / 20)
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None
        self._lines: deque[bytes] = deque(maxlen=_LINES_LIMIT)
        self._new_lines = asyncio.Event()
        self._talks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """End `run`."""
        self._stopping.set()

    async def run(self, listener: socket.socket) -> None:
        """Serve until `stop`. Raises what a merge raises, such as JournalError where the disk takes nothing more."""
        server = await asyncio.start_unix_server(self._accept, sock=listener, limit=_BUFFER_BYTES)
        ticker = asyncio.ensure_future(self._tick())
        try:
            await self._stopping.wait()
        finally:
            ticker.cancel()
            for talk in list(self._talks):
                talk.cancel()
            await asyncio.wait({ticker, *self._talks})
            server.close()
        if self._error is not None:
            raise self._error

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._guarded(self.service.tick)

    def _guarded(self, call, *arguments) -> None:
        """What cannot be written ends this process; it is started again with what is on disk."""
        try:
            call(*arguments)
        except BaseException as error:
            self._error = self._error or error
            self.stop()

    def _tell(self, event: Event) -> None:
        self._lines.append(msgspec.json.encode(msgspec.structs.replace(event, t=time.time())))
        self._new_lines.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            async with asyncio.timeout(_OPENING_S):
                hello = msgspec.json.decode(await _message(reader), type=Introduction)
            if hello.caller:
                await self._talk(reader, writer, hello.caller)
            else:
                await self._keep_telling(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError):
            pass
        except asyncio.CancelledError:
            pass  # asyncio's own callback would take it for an error
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: str) -> None:
        news = asyncio.Event()
        session = Session(caller, wake=news.set)
        reading = asyncio.ensure_future(self._receive(session, reader))
        sending = asyncio.ensure_future(self._send(session, writer, news))
        tasks = {reading, sending}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if session.closing:
                await asyncio.wait({sending}, timeout=_FAREWELL_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not self._stopping.is_set():  # else it is this process that goes, and islands come back to the next one
                self._guarded(self.service.lost, session, session.closing or "its connection closed")

    async def _receive(self, session: Session, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while not session.closing and self._error is None:
                self._guarded(self.service.receive, session, await _message(reader))

    async def _send(self, session: Session, writer: asyncio.StreamWriter, news: asyncio.Event) -> None:
        with suppress(OSError):
            while True:
                message = session.next_message()
                if message is not None:
                    writer.writelines((LENGTH.pack(len(message)), message))
                    await writer.drain()
                elif session.closing:
                    return
                else:
                    news.clear()
                    await news.wait()

    async def _keep_telling(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lines of the event log go to the hub, which has the file."""
        telling = asyncio.ensure_future(self._tell_lines(writer))
        ended = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({telling, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (telling, ended):
                task.cancel()
            await asyncio.wait({telling, ended})

    async def _tell_lines(self, writer: asyncio.StreamWriter) -> None:
        while True:
            while self._lines:
                line = self._lines[0]
                writer.writelines((LENGTH.pack(len(line)), line))
                await writer.drain()
                self._lines.popleft()
            self._new_lines.clear()
            await self._new_lines.wait()


async def _message(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_LIMIT_BYTES:
        raise ConnectionResetError(f"a message of {length} bytes")
    return await reader.readexactly(length)


def _give_memory_back() -> None:
    """Let large blocks go back to the system as they are freed: glibc would keep as much again as the values take."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def main(arguments: Sequence[str], *, version: str) -> int:
    """Run until SIGTERM or Ctrl-C and return the exit status. Errors are printed, without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m ragtag.outer", description="The outer loop of one run's islands.")
    parser.add_argument("--fd", type=int, required=True, help="a bound Unix socket to listen on, inherited")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--run-dir", type=Path, required=True, help="where values and journal lie")
    parser.add_argument("--patience", type=float, default=30.0, help="patience_s, in seconds")
    parser.add_argument("--quiet", action="store_true", help="print only what goes wrong")
    options = parser.parse_args(arguments)
    level = logging.WARNING if options.quiet else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="ragtag outer: %(message)s")
    logging.getLogger("ragtag.outer").setLevel(level)
    _give_memory_back()
    try:
        listener = socket.socket(fileno=options.fd)
        listener.listen(128)
        store = Store(options.run_dir / "outer", run=options.run)
        try:
            asyncio.run(_serve(store, listener, run=options.run, version=version, patience_s=options.patience))
        finally:
            store.close()
    except (JournalError, StoreError) as error:
        print(f"ragtag outer: {error}", file=sys.stderr)
        return JOURNAL_STATUS
    except RagtagError as error:
        print(f"ragtag outer: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(store: Store, listener: socket.socket, *, run: str, version: str, patience_s: float) -> None:
    server = OuterServer(store, run=run, version=version, patience_s=patience_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(listener)
