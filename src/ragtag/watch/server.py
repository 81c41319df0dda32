"""Serves a run's page on a socket that is already listening, and lets go of whoever only holds a connection.

The one idea: connections have a number and a patience. One that asks for nothing makes room for the next one, and one
that does not take what it asked for is ended by the kernel.
"""

import os
import socket
import threading
import time
from asyncio import TimerHandle, Transport
from pathlib import Path
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragtag.watch.live import Live
from ragtag.watch.page import INTERVAL_S, Page

MOST_CONNECTIONS = 100
PATIENCE_S = 20.0
"""How long somebody may leave unread what was sent, or connect and ask for nothing."""


def serve(path: Path, listener: socket.socket, token: str) -> None:
    """Serve the page of the log at `path` until the process is told to end."""
    server(path, listener, token).run(sockets=[listener])


def server(
    path: Path,
    listener: socket.socket,
    token: str,
    *,
    interval_s: float = INTERVAL_S,
    patience_s: float = PATIENCE_S,
) -> uvicorn.Server:
    """Return the server, to be run with `sockets=[listener]`."""
    page = Page(Live(path), token, interval_s=interval_s)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_s))
    protocol = cast("type[H11Protocol]", type("Patient", (_Patient,), {"patience_s": patience_s}))
    return uvicorn.Server(
        uvicorn.Config(
            page.application,
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,  # the token is in an address
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
    )


def end_with_parent() -> None:
    """End this process when the one that has started it is gone, on systems whose kernel does not."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=look, daemon=True).start()


class _Patient(H11Protocol):
    patience_s = PATIENCE_S
    transport: Transport
    made_s = 0.0
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Make room for it."""
        super().connection_made(transport)
        self.made_s = self.loop.time()
        self._timer = self.loop.call_later(self.patience_s, self._end_if_idle)
        connections = [cast("_Patient", each) for each in self.connections]
        others = [each for each in connections if each is not self and not each.transport.is_closing()]
        if len(others) >= MOST_CONNECTIONS:
            idle = [each for each in others if each.is_idle]
            longest = min(idle, key=lambda each: each.made_s, default=self)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for no answer."""
        return self.cycle is None or self.cycle.response_complete

    def _end_if_idle(self) -> None:
        if self.cycle is None:
            self.transport.abort()
