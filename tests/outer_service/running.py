"""A hub with an outer loop behind it, on threads of this process, and islands that talk to it over real sockets."""

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

import ragtag
from ragtag.hub.journal import Journal
from ragtag.hub.rules import restore
from ragtag.hub.rules_state import JournalRecord, RunSettings
from ragtag.hub.server import HubServer, listen_on
from ragtag.outer.client import IslandClient
from ragtag.outer.process import OuterServer
from ragtag.outer.protocol import Attach, Beat, Wanted
from ragtag.outer.service import Service
from ragtag.outer.store import Store
from ragtag.watch.events import AnyEvent, Event
from ragtag.watch.log_file import LogFile

E = TypeVar("E", bound=Event)
T = TypeVar("T")

TOKEN = "a-token-of-the-tests"
VERSION = ragtag.__version__
PATIENCE_S = 2.0
LONG_S = 20.0
"""More than any test waits for what should come."""


class _Threaded:
    """An object with `run(listener)` and `stop()` on a loop of its own."""

    def __init__(self, make: Callable[[], HubServer | OuterServer], listener: socket.socket) -> None:
        self.loop = asyncio.new_event_loop()
        self.error: BaseException | None = None

        async def made() -> HubServer | OuterServer:
            return make()

        self.server = self.loop.run_until_complete(made())
        self.thread = threading.Thread(target=self._run, args=(listener,))
        self.thread.start()

    def _run(self, listener: socket.socket) -> None:
        try:
            self.loop.run_until_complete(self.server.run(listener))
            self.loop.run_until_complete(asyncio.sleep(0))
        except BaseException as error:
            self.error = error
        finally:
            self.loop.close()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()


class OuterLoop:
    """Hub and outer process of one run; either can be stopped and started again."""

    def __init__(self, directory: Path, *, patience_s: float = PATIENCE_S, tls=None) -> None:
        self.directory, self.patience_s, self.tls = directory, patience_s, tls
        self.listener = listen_on("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self._short = tempfile.TemporaryDirectory(prefix="ragtag-")
        self.path = f"{self._short.name}/outer"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(self.path)
        self._unix.listen(64)
        self.log_file = LogFile(directory / "log.jsonl")
        self.start_outer()
        self.start_hub()

    def start_outer(self) -> None:
        self.store = Store(self.directory / "outer", run="r")
        self.outer = _Threaded(
            lambda: OuterServer(self.store, run="r", version=VERSION, patience_s=self.patience_s), self._unix.dup()
        )

    def stop_outer(self) -> None:
        self.outer.close()
        self.store.close()

    def start_hub(self) -> None:
        self.journal: Journal[JournalRecord] = Journal(self.directory, run="r", records=JournalRecord)
        settings = RunSettings(run="r", version=VERSION, patience_s=self.patience_s)
        self.hub = _Threaded(
            lambda: HubServer(
                state=restore(self.journal.records, settings),
                journal=self.journal,
                token=TOKEN,
                log_file=self.log_file,
                outer=self.path,
                tls=self.tls,
            ),
            self.listener.dup(),
        )

    def stop_hub(self) -> None:
        self.hub.close()
        self.journal.close()

    def events(self) -> list[AnyEvent]:
        path = self.directory / "log.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=AnyEvent) for line in lines]

    def await_event(self, kind: type[E], wanted: Callable[[E], bool] = lambda event: True) -> E:
        """The first event of the log that is of this kind, and wanted, once it is there."""

        def found() -> E | None:
            return next((each for each in self.events() if isinstance(each, kind) and wanted(each)), None)

        return eventually(found)

    @property
    def service(self) -> Service:
        """What merges."""
        assert isinstance(self.outer.server, OuterServer)
        return self.outer.server.service

    def close(self) -> None:
        self.stop_hub()
        self.stop_outer()
        self._unix.close()
        self.listener.close()
        self.log_file.close()
        self._short.cleanup()


@contextlib.contextmanager
def outer_loop(directory: Path, **settings) -> Iterator[OuterLoop]:
    """Both on threads; an error of their own fails the test."""
    running = OuterLoop(directory, **settings)
    try:
        yield running
    finally:
        running.close()
    for each in (running.hub, running.outer):
        if each.error is not None:
            raise each.error


def eventually(question: Callable[[], T | None]) -> T:
    """What `question` answers, once it is neither None nor False."""
    deadline_s = time.monotonic() + LONG_S
    while True:
        answer = question()
        if answer is not None and answer is not False:
            return answer
        assert time.monotonic() < deadline_s, "it has not come"
        time.sleep(0.01)


class Island:
    """A client, and own values of a model that is cut into fragments; what training would do is done by the test."""

    def __init__(
        self,
        port: int,
        name: str,
        numel: Sequence[int] = (300, 7),
        *,
        token: str = TOKEN,
        wanted: Wanted | None = None,
        patience_s: float = PATIENCE_S,
        **about,
    ) -> None:
        self.name, self.numel = name, tuple(numel)
        self.own = [torch.zeros(each) for each in numel]
        self.step = 0
        self.training = False
        wanted = wanted or Wanted(inner_steps=10, codec="fp32", rate=1.0, momentum=0.0)
        fields = {"run": "r", "version": VERSION, "model": "m", "numel": self.numel, "batch": 8, **about}
        session = fields.pop("session", f"session-of-{name}")
        self.client = IslandClient(
            "127.0.0.1",
            port,
            token,
            lambda: Attach(
                island=name, session=session, step=self.step, wanted=wanted, training=self.training, **fields
            ),
            patience_s=patience_s,
        )

    def await_stage(self, stage: str) -> None:
        assert self.client.wait(lambda: self.client.talk.stage == stage, LONG_S), self.client.talk.trouble

    def give(self, values: Sequence[torch.Tensor], *, state: bytes = b"state", step: int = 0) -> None:
        """Be the first: these are the values that all begin with."""
        self.await_stage("alone")
        self.own = [each.clone() for each in values]
        self.client.give(values, state, step=step)
        self.await_stage("open")
        self._train()

    def take(self) -> bytes:
        """Begin with what the hub has; return the state."""
        self.await_stage("open")
        self.client.fetch_all()
        assert self.client.wait(lambda: self.client.talk.values.begun, LONG_S), self.client.talk.trouble
        self.own = [each.clone() for each in self.client.talk.values.values]
        assert self.client.talk.state is not None
        self._train()
        return self.client.talk.state

    def _train(self) -> None:
        """Be one of those who are waited for."""
        beat = Beat(step=self.step, training=True)
        self.training = True
        self.client.note(beat)
        self.client.say(beat)
        # Once this is answered, the hub has heard the other.
        self.client.fetch_all(state=False)
        assert self.client.wait(lambda: not self.client.talk.fetching, LONG_S), self.client.talk.trouble

    def send(self, fragment: int, *, tokens: float = 8.0, samples: int = 8, steps: int = 1, codec="fp32", **about):
        self.step += steps
        counted = {"tokens": tokens, "samples": samples, "steps": steps, "step": self.step}
        # The hub's answer to the one before may still be on its way.
        assert self.client.wait(lambda: not self.client.talk.values.is_busy(fragment), LONG_S)
        assert self.client.send(fragment, self.own[fragment].clone, codec=codec, **counted, **about)

    def await_version(self, fragment: int, version: int) -> None:
        """Wait for it and add what has arrived."""
        values = self.client.talk.values

        def here() -> bool:
            return values.begun and values.versions[fragment] >= version

        assert self.client.wait(here, LONG_S), (self.client.talk.trouble, values.versions)
        self.add()

    def add(self) -> None:
        with self.client.lock:
            while arrivals := self.client.talk.values.arrivals:
                for fragment, correction in arrivals.items():
                    self.own[fragment] += correction
                self.client.talk.values.added(list(arrivals))

    def close(self) -> None:
        assert self.client.close()

    def __enter__(self) -> "Island":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
