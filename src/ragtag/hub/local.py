"""The fake of the network: a hub in this process, with the same rules, a scripted clock and no sockets.

The one idea: a test says when time passes, when a connection breaks and when the hub is away; between two of its calls
everything that can be delivered has been delivered.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ragtag.core.errors import LaunchError, RagtagError
from ragtag.hub.frames import Beat, Frame, FromHub, Hello, Logged, Refused, encode, from_hub, from_worker
from ragtag.hub.mailbox import Mailbox
from ragtag.hub.rules import advance, restore
from ragtag.hub.rules_state import (
    CloseConnection,
    Closed,
    Event,
    Journal,
    JournalRecord,
    Log,
    Received,
    Restarted,
    RunSettings,
    Send,
    Tick,
)
from ragtag.hub.rules_suspicion import beat_s

F = TypeVar("F", bound=Frame)


class LocalHub:
    """Runs the hub's rules for clients in this process; any thread may call it.

    Args:
        patience_s: the run's, in seconds of `now_s`.
    """

    def __init__(self, *, run: str = "run", version: str = "0", patience_s: float = 30.0) -> None:
        self.settings = RunSettings(run=run, version=version, patience_s=patience_s)
        self.now_s = 0.0
        """The scripted clock."""
        self.journal: list[JournalRecord] = []
        self.log: list[str] = []
        self.up = False
        self._lock = threading.RLock()
        self._clients: dict[str, LocalClient] = {}
        """Those connected, by incarnation."""
        self._everybody: list[LocalClient] = []
        self._posts: deque[tuple[LocalClient, FromHub]] = deque()
        self._posting = False
        self.start()

    def client(
        self,
        hello: Callable[[], Hello],
        *,
        beat: Callable[[], Beat],
        on_frame: Callable[[FromHub], None] | None = None,
    ) -> "LocalClient":
        """A worker's end; once it has said `connect` it stays in touch, also over restarts, until cut or closed."""
        client = LocalClient(self, hello, beat, on_frame)
        with self._lock:
            self._everybody.append(client)
        return client

    def pass_time(self, seconds: float) -> None:
        """Let time pass, heartbeat by heartbeat: clients in touch beat, then the hub looks at its clock."""
        step_s = beat_s(self.settings.patience_s)
        while seconds > 0:
            with self._lock:
                self.now_s += min(step_s, seconds)
                seconds -= step_s
                beating = [client for client in self._everybody if client.connected and not client.frozen]
            for client in beating:
                client.send(client.make_beat())
            self._happen(Tick())

    def stop(self) -> None:
        """The hub dies: connections break, and all it has not journalled is gone."""
        with self._lock:
            self.up = False
            self._posts.clear()
            self._clients.clear()

    def start(self) -> None:
        """A hub starts from the journal, and clients that are neither cut nor frozen come back."""
        with self._lock:
            self.stop()
            self.state = restore(tuple(self.journal), self.settings)
            self.up = True
        self._happen(Restarted())
        for client in list(self._everybody):
            if client.wants_in:
                client.connect()

    # For its clients

    def is_connected(self, client: "LocalClient") -> bool:
        """Whether the hub is up and has this client's connection."""
        return self.up and self._clients.get(client.inc) is client

    def take(self, client: "LocalClient", frame: Frame) -> bool:
        """A frame comes from a client; False: it has no connection."""
        with self._lock:
            if not self.up or (not isinstance(frame, Hello) and self._clients.get(client.inc) is not client):
                return False
            if isinstance(frame, Hello):
                self._clients[client.inc] = client
        # As the wire would: whatever cannot be encoded and decoded is no frame.
        received = from_worker(encode(frame))
        assert not isinstance(received, Logged), "this hub keeps no log"
        self._happen(Received(inc=client.inc, frame=received))
        return True

    def lose(self, client: "LocalClient", reason: str) -> None:
        """A client's connection breaks; the hub notices at once."""
        with self._lock:
            if self._clients.get(client.inc) is not client:
                return
            del self._clients[client.inc]
            # What was under way on a broken connection is lost.
            self._posts = deque(post for post in self._posts if post[0] is not client)
        if self.up:
            self._happen(Closed(inc=client.inc, reason=reason))

    def post(self) -> None:
        """Deliver what is under way, in order, on this thread; where another thread is at it, it goes on with it."""
        with self._lock:
            if self._posting:
                return
            self._posting = True
        try:
            while True:
                with self._lock:
                    place = next((place for place, (to, _) in enumerate(self._posts) if not to.frozen), None)
                    if place is None:
                        self._posting = False
                        return
                    client, frame = self._posts[place]
                    del self._posts[place]
                client.receive(frame)
        except BaseException:
            self._posting = False
            raise

    def _happen(self, event: Event) -> None:
        with self._lock:
            if not self.up:
                return
            self.state, effects = advance(self.state, event, self.now_s)
            for effect in effects:
                if isinstance(effect, Journal):
                    self.journal.append(effect.record)
                elif isinstance(effect, Send) and effect.inc in self._clients:
                    self._posts.append((self._clients[effect.inc], from_hub(encode(effect.frame))))
                elif isinstance(effect, CloseConnection):
                    self._clients.pop(effect.inc, None)
                elif isinstance(effect, Log):
                    self.log.append(effect.text)
        self.post()


class LocalClient:
    """What `HubClient` is to a real hub, with what a test does to it: `cut`, `freeze`, `thaw`."""

    def __init__(
        self,
        hub: LocalHub,
        hello: Callable[[], Hello],
        beat: Callable[[], Beat],
        on_frame: Callable[[FromHub], None] | None,
    ) -> None:
        self._hub, self._hello = hub, hello
        self.make_beat = beat
        self.inc = hello().member.inc
        self.frozen = False
        self.wants_in = False
        """Whether it connects again by itself."""
        self.received: list[FromHub] = []
        self._mailbox = Mailbox(on_frame)
        self._outbox: list[Frame] = []
        self._heard_s = hub.now_s

    @property
    def connected(self) -> bool:
        """Whether the hub has its connection."""
        return self._hub.is_connected(self)

    @property
    def error(self) -> RagtagError | None:
        """Why this client has given up for good; None: it has not."""
        return self._mailbox.error

    @property
    def lost_for_s(self) -> float:
        """Seconds since the hub was last heard; 0 while connected."""
        if self.connected and not self.frozen:
            self._heard_s = self._hub.now_s
        return self._hub.now_s - self._heard_s

    @property
    def heard_ago_s(self) -> float:
        """Seconds since the hub was last heard."""
        return self.lost_for_s

    def send_lines(self, inc: str, lines: Sequence[bytes]) -> None:
        """Lines of the event log: this hub keeps none."""

    def send(self, frame: Frame) -> None:
        """Send now, or queue until there is a connection."""
        if (self.frozen or not self._hub.take(self, frame)) and not isinstance(frame, Beat):
            self._outbox.append(frame)

    def wait(self, *kinds: type[F], timeout_s: float) -> F | None:
        """As `HubClient.wait`; `timeout_s` is real time, for tests with threads."""
        return self._mailbox.wait(*kinds, timeout_s=timeout_s)

    def close(self, flush_s: float = 1.0) -> bool:
        """End the connection for good."""
        self.cut("it closed its connection")
        return True

    def cut(self, reason: str = "its connection closed") -> None:
        """The process dies, or its link: the hub notices at once, and the client does not come back by itself."""
        # Where it stands at this moment.
        self._heard_s = self._hub.now_s if self.connected else self._heard_s
        self.wants_in = False
        self._hub.lose(self, reason)

    def connect(self) -> None:
        """Connect (again): Hello, and what was queued."""
        self.wants_in = True
        if not self.frozen and self._hub.take(self, self._hello()):
            queued, self._outbox = self._outbox, []
            for frame in queued:
                self.send(frame)

    def freeze(self) -> None:
        """As by SIGSTOP: connected still, but it neither sends nor hears."""
        self._heard_s = self._hub.now_s if self.connected else self._heard_s
        self.frozen = True

    def thaw(self) -> None:
        """As by SIGCONT: it hears what was sent meanwhile, and what it had queued leaves."""
        self.frozen = False
        if self.connected:
            queued, self._outbox = self._outbox, []
            for frame in queued:
                self.send(frame)
            self._hub.post()
        elif self.wants_in:
            self.connect()

    def receive(self, frame: FromHub) -> None:
        """A frame arrives."""
        self._heard_s = self._hub.now_s
        self.received.append(frame)
        if isinstance(frame, Refused):
            self.wants_in = False
            self._mailbox.error = LaunchError(f"The hub does not take this worker: {frame.reason.rstrip('.')}.")
        self._mailbox.put(frame)
