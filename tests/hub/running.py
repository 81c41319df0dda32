"""A hub to test against, in a thread or as a process, and workers that answer it as they should."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import ragtag
from ragtag.hub.client import HubClient
from ragtag.hub.door import Limits
from ragtag.hub.frames import Beat, Frame, FromHub, Go, Hello, Join, Member, Prep, Ready, Started
from ragtag.hub.journal import Journal
from ragtag.hub.rules import restore
from ragtag.hub.rules_state import JournalRecord, RunSettings
from ragtag.hub.server import HubServer, listen_on

F = TypeVar("F", bound=Frame)

TOKEN = "a-token-of-the-tests"
VERSION = ragtag.__version__
PATIENCE_S = 3.0
LONG_S = 20.0
"""More than any test waits for what should come."""


class Service:
    """A hub on a thread of this process."""

    def __init__(self, directory: Path, *, patience_s: float = PATIENCE_S, limits: Limits | None = None) -> None:
        self.journal: Journal[JournalRecord] = Journal(directory, run="r", records=JournalRecord)
        settings = RunSettings(run="r", version=VERSION, patience_s=patience_s)
        self.listener = listen_on("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.error: BaseException | None = None
        self.loop = asyncio.new_event_loop()

        async def make() -> HubServer:
            return HubServer(
                state=restore(self.journal.records, settings), journal=self.journal, token=TOKEN, limits=limits
            )

        self.server = self.loop.run_until_complete(make())
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self.server.run(self.listener))
        except BaseException as error:
            self.error = error
        finally:
            self.loop.close()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        self.listener.close()
        self.journal.close()


@contextlib.contextmanager
def service(directory: Path, **settings) -> Iterator[Service]:
    """A hub on a thread; an error of its own fails the test."""
    running = Service(directory, **settings)
    try:
        yield running
    finally:
        running.close()
    if running.error is not None:
        raise running.error


class Process:
    """`python -m ragtag.hub`, on a socket that outlives it."""

    def __init__(self, directory: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.listener = listen_on("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self._arguments = ["--fd", str(self.listener.fileno()), "--run-dir", str(directory), "--run", "r"]
        self._arguments += ["--patience", str(patience_s)]
        self.start()

    def start(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "ragtag.hub", *self._arguments],
            pass_fds=[self.listener.fileno()],
            env={**os.environ, "RAGTAG_TOKEN": TOKEN},
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and return the exit status and what the process had printed."""
        self.popen.send_signal(number)
        _, printed = self.popen.communicate(timeout=LONG_S)
        return self.popen.returncode, printed

    def close(self) -> None:
        if self.popen.poll() is None:
            self.end(signal.SIGKILL)
        self.listener.close()


class Worker:
    """A client that answers each Prep, says Ready in a first generation, and keeps all it hears."""

    def __init__(
        self, port: int, name: str, *, version: str = VERSION, expected: int = 1, patience_s: float = PATIENCE_S
    ) -> None:
        self.inc = f"{name}-{secrets.token_hex(4)}"
        self.member = Member(inc=self.inc, name=name, host="here", address="127.0.0.1", store_port=1)
        self.has_state = False
        self.generation = 0
        self.doing, self.doing_s = "forward", 0.0
        self.heard: list[FromHub] = []
        self.num_hellos = 0
        self._last_go = 0
        self._version, self._expected = version, expected
        self._made = threading.Event()
        self.client = HubClient(
            "127.0.0.1",
            port,
            TOKEN,
            self.hello,
            patience_s=patience_s,
            beat=self.beat,
            on_frame=self.hear,
        )
        self._made.set()

    def hello(self) -> Hello:
        self.num_hellos += 1
        return Hello(
            run="r",
            version=self._version,
            member=self.member,
            generation=self.generation,
            has_state=self.has_state,
            expected=self._expected,
        )

    def beat(self) -> Beat:
        return Beat(generation=self.generation, inc=self.inc, step=1, doing=self.doing, doing_s=self.doing_s)

    def hear(self, frame: FromHub) -> None:
        assert self._made.wait(LONG_S)
        self.heard.append(frame)
        if isinstance(frame, Prep) and self.inc in frame.members:
            self.client.send(Join(generation=frame.generation, inc=self.inc, has_state=self.has_state))
        elif isinstance(frame, Go) and self.inc in [member.inc for member in frame.members]:
            self.generation = frame.generation
            if frame.action == "start":
                self.client.send(Ready(generation=frame.generation, inc=self.inc))
        elif isinstance(frame, Started):
            self.has_state = True

    def next(self, kind: type[F]) -> F:
        """The next frame of this kind."""
        frame = self.client.wait(kind, timeout_s=LONG_S)
        assert frame is not None, f"{self.inc} did not hear a {kind.__name__}; it heard {self.heard}"
        return frame

    def next_go(self) -> Go:
        """The next generation; the hub may tell one twice."""
        while True:
            go = self.next(Go)
            if go.generation > self._last_go:
                self._last_go = go.generation
                return go


@contextlib.contextmanager
def workers(port: int, *names: str, **settings) -> Iterator[list[Worker]]:
    """Workers of one machine, which are closed at the end."""
    made = [Worker(port, name, expected=len(names), **settings) for name in names]
    try:
        yield made
    finally:
        ended = [worker.client.close() for worker in made]
        assert all(ended)


def trained(*members: Worker) -> Go:
    """Wait until these are the first generation and hold the state."""
    goes = [member.next_go() for member in members]
    assert all(go == goes[0] for go in goes)
    for member in members:
        member.next(Started)
    return goes[0]


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds()`."""
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.005)


def raw(port: int, data: bytes = b"") -> socket.socket:
    """A plain connection that has sent `data`."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
    sock.sendall(data)
    return sock


def answer_to(port: int, data: bytes) -> bytes:
    """All that comes back for `data` until the hub closes."""
    with raw(port, data) as sock:
        parts = []
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(65536):
                parts.append(part)
    return b"".join(parts)
