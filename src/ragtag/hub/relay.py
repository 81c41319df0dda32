"""Connections of islands, passed on to the process that merges what they send.

The one idea: the hub has checked the token and bounds who may come; what is in the messages is none of its business.
So it needs no torch, and merging a large model never holds up the workers whose signs of life it counts. Bytes pass
through in both directions, no faster than the slower end takes them.
"""

import asyncio
import logging
import struct
from collections.abc import Callable
from contextlib import suppress

import msgspec
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from ragtag.hub.frames import FRAME_LIMIT_BYTES

log = logging.getLogger("ragtag.hub")

PATH = "/outer"
"""What islands ask for at the hub's port."""
LENGTH = struct.Struct("<I")
"""Precedes every message between the hub and the outer process."""
_PAUSE_S = 0.2
_OPENING_S = 10.0


class Introduction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First message of every connection from the hub to the outer process."""

    caller: str
    """Address and port of the island; empty: the hub itself, which listens for lines of the event log."""


class Relay:
    """Passes connections on to what listens at a Unix socket.

    Args:
        path: of that socket, which may be one that nobody has taken a connection from yet.
        most: connections at a time.
        write_lines: told lines of the event log.
    """

    def __init__(self, path: str, *, most: int, write_lines: Callable[[list[bytes]], None]) -> None:
        self._path, self._most, self._write_lines = path, most, write_lines
        self.callers: list[str] = []
        """Addresses of the islands that are connected."""

    def has_room(self) -> bool:
        """Whether one more connection is taken."""
        return len(self.callers) < self._most

    async def pass_on(self, connection: ServerConnection, caller: str) -> None:
        """Return when either end has closed; both are closed then."""
        self.callers.append(caller)
        writer = None
        try:
            async with asyncio.timeout(_OPENING_S):
                reader, writer = await self._open(caller)
            tasks = [
                asyncio.ensure_future(task) for task in (_inwards(connection, writer), _outwards(reader, connection))
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None and not _ordinary(error):
                    raise error
        except (OSError, TimeoutError):
            await connection.close(1013, "the outer loop is away; come again")
        finally:
            self.callers.remove(caller)
            if writer is not None:
                writer.close()
        await connection.close(1001, "the outer loop has closed the connection")

    async def keep_log(self) -> None:
        """Write what the outer process has to say into the event log, for as long as this hub serves."""
        while True:
            try:
                reader, writer = await self._open("")
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                while True:
                    self._write_lines((await _message(reader)).split(b"\n"))
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(_PAUSE_S)
            finally:
                writer.close()

    async def _open(self, caller: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=1 << 18)
        hello = msgspec.json.encode(Introduction(caller=caller))
        writer.write(LENGTH.pack(len(hello)) + hello)
        return reader, writer


async def _inwards(connection: ServerConnection, writer: asyncio.StreamWriter) -> None:
    async for message in connection:
        data = message if isinstance(message, bytes) else message.encode()
        writer.writelines((LENGTH.pack(len(data)), data))
        await writer.drain()


async def _outwards(reader: asyncio.StreamReader, connection: ServerConnection) -> None:
    while True:
        await connection.send(await _message(reader))


async def _message(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_LIMIT_BYTES:
        raise ConnectionResetError(f"a message of {length} bytes")
    return await reader.readexactly(length)


def _ordinary(error: BaseException) -> bool:
    return isinstance(error, OSError | asyncio.IncompleteReadError | ConnectionClosed)


async def stopped(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
