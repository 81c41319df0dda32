"""The hub's end of one worker's connection: a bounded queue towards it, and a bounded pace from it.

The one idea: the hub never waits for a worker. Whoever does not read loses its connection; whoever talks too much is
read more slowly.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from ragtag.hub.door import Limits

_BURST_S = 5.0


class Peer:
    """One worker's connection, once it has said Hello."""

    def __init__(self, connection: ServerConnection, inc: str, limits: Limits, *, heard_s: float) -> None:
        self.connection, self.inc = connection, inc
        self.heard_s = heard_s
        """When it was last heard, by the hub's clock."""
        self.dropped = ""
        """Why the hub gave up this connection; empty: it did not."""
        self._limits = limits
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._farewell: str | None = None
        self._news = asyncio.Event()

    def send(self, data: bytes) -> bool:
        """Queue a frame; False: too many wait already, and the connection is dropped."""
        if self._farewell is not None:
            return True
        if len(self._queue) >= self._limits.queue_frames or self._queued_bytes + len(data) > self._limits.queue_bytes:
            self.abort("it does not read what the hub sends")
            return False
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._news.set()
        return True

    def finish(self, reason: str) -> None:
        """Close the connection once everything queued was sent."""
        self._farewell = reason if self._farewell is None else self._farewell
        self._news.set()

    def abort(self, reason: str) -> None:
        """Drop the connection now."""
        self.dropped = self.dropped or reason
        self.connection.transport.abort()

    async def deliver(self, within_s: float) -> None:
        """Send what is queued until the connection ends; drop it where one frame takes more than `within_s` seconds."""
        try:
            while True:
                while self._queue:
                    data = self._queue.popleft()
                    async with asyncio.timeout(within_s):
                        await self.connection.send(data)
                    self._queued_bytes -= len(data)
                if self._farewell is not None:
                    await self.connection.close(1000, _short(self._farewell))
                    return
                self._news.clear()
                await self._news.wait()
        except TimeoutError:
            self.abort("it does not read what the hub sends")
        except ConnectionClosed:
            pass


class Pace:
    """How long to wait before the next frame is read, for a rate of `per_s` after a burst (a token bucket)."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s, self._clock = per_s, clock
        self._due_s = clock() - _BURST_S

    def wait_s(self) -> float:
        """Count a frame; return the seconds to wait, 0 inside the burst."""
        now_s = self._clock()
        self._due_s = max(self._due_s, now_s - _BURST_S) + 1 / self._per_s
        return max(0.0, self._due_s - now_s)


def _short(reason: str) -> str:
    """A close frame holds 123 bytes."""
    return reason.encode()[:120].decode(errors="ignore")
