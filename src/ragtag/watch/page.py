"""The live page as an ASGI application: three files, the state as JSON, and a stream of what changes in it.

The one idea: nothing that a viewer does or leaves undone can grow anything here. The log is read while somebody looks,
once for all; a viewer is sent the newest state when it has taken the last one, at most twice a second.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ragtag.watch.admission import Admission
from ragtag.watch.live import Live, Sections, message

INTERVAL_S = 0.5
MOST_VIEWERS = 16
_SAYS_S = 5.0
"""A viewer hears something at least this often, so that it knows it is connected."""
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Page:
    """`application` serves the page of `live`'s run to those who know `token`."""

    def __init__(self, live: Live, token: str, *, interval_s: float = INTERVAL_S) -> None:
        self.viewers = 0
        self._live, self._interval_s = live, interval_s
        self._lock = asyncio.Lock()
        self._fresh_until_s, self._is_complete = 0.0, False
        routes = [Route(path, _static(*file)) for path, file in _FILES.items()]
        routes += [Route("/state", self._state), Route("/events", self._events)]
        self.application = Admission(Starlette(routes=routes), token)

    async def _refresh(self) -> Sections:
        """Return the newest sections, read from the log at most once an interval, whoever asks."""
        async with self._lock:
            if time.monotonic() >= self._fresh_until_s:
                # A long log fills the page while it is read.
                self._is_complete = await asyncio.to_thread(self._live.refresh, self._interval_s)
                self._fresh_until_s = time.monotonic() + 0.9 * self._interval_s if self._is_complete else 0.0
            return self._live.sections

    async def _state(self, _: Request) -> Response:
        await self._refresh()
        while not self._is_complete:
            await self._refresh()
        drawn = {**self._live.drawn, "quiet_s": self._live.quiet_s()}
        return Response(msgspec.json.encode(drawn), media_type="application/json")

    async def _events(self, _: Request) -> Response:
        if self.viewers >= MOST_VIEWERS:
            return PlainTextResponse(
                f"{self.viewers} others look at this page, and it shows itself to no more. Close one of them.\n",
                status_code=503,
                headers={"Retry-After": "5"},
            )
        self.viewers += 1
        return _Stream(self)

    async def changes(self) -> AsyncIterator[bytes]:
        """Yield server-sent events for one viewer, the first with everything."""
        sent: Sections = {}
        said_s = -math.inf
        yield b"retry: 1000\n\n"
        while True:
            newest = await self._refresh()
            if newest is not sent or time.monotonic() - said_s >= _SAYS_S:
                yield message(newest, sent)
                sent, said_s = newest, time.monotonic()
            if self._is_complete:
                await asyncio.sleep(self._interval_s)


class _Stream(StreamingResponse):
    def __init__(self, page: Page) -> None:
        super().__init__(page.changes(), media_type="text/event-stream")
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._page.viewers -= 1


def _static(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = resources.files("ragtag.watch").joinpath("static", name).read_bytes()

    async def file(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return file
