import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from tests.hub.running import LONG_S, PATIENCE_S, TOKEN, VERSION, eventually, service, trained, workers
from websockets.sync.server import ServerConnection, serve

from ragtag.core.errors import LaunchError, RagtagError, SettingError
from ragtag.hub.client import HubClient
from ragtag.hub.frames import (
    FRAME_LIMIT_BYTES,
    Beat,
    Checkpointed,
    End,
    Fail,
    FromHub,
    Go,
    Hello,
    Join,
    Leave,
    Member,
    Pointed,
    Prep,
    Ready,
    Refused,
    Started,
    Trouble,
    Welcome,
    encode,
)
from ragtag.hub.local import LocalHub
from ragtag.hub.mailbox import Mailbox
from ragtag.hub.rules_limits import TEXT_LIMIT

MEMBER = Member(inc="i", name="n", host="h", address="127.0.0.1", store_port=1)
WELCOME = encode(Welcome(epoch=1, patience_s=1.0))


def hello() -> Hello:
    return Hello(run="r", version=VERSION, member=MEMBER, generation=0, has_state=False)


def beat() -> Beat:
    return Beat(generation=0, inc="i", step=0, doing="", doing_s=0.0)


def client_of(port: int, *, token: str = TOKEN, patience_s: float = PATIENCE_S, **settings) -> HubClient:
    settings = {"hello": hello, "beat": beat, **settings}
    return HubClient("127.0.0.1", port, token, patience_s=patience_s, jitter=lambda: 0.0, **settings)


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def scripted(handler):
    """A WebSocket server that does what `handler(connection, number)` says for each connection, counted from 1."""
    count = [0]

    def each(connection: ServerConnection) -> None:
        count[0] += 1
        handler(connection, count[0])

    with serve(each, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def test_it_says_hello_again_after_each_loss_with_what_it_is_by_then():
    heard = []
    seen = [0]

    def handler(connection, number):
        heard.append(json.loads(connection.recv()))
        connection.send(WELCOME)
        if number == 3:
            heard.append(json.loads(connection.recv()))
            with contextlib.suppress(Exception):
                connection.recv()
        seen[0] = number

    def hello_now() -> Hello:
        return Hello(run="r", version=VERSION, member=MEMBER, generation=seen[0], has_state=seen[0] > 0)

    with scripted(handler) as port:
        client = client_of(port, hello=hello_now)
        eventually(lambda: len(heard) >= 4, "three hellos and a beat")
        assert client.close()
    assert [(each["type"], each["generation"], each["has_state"]) for each in heard[:3]] == [
        ("hello", 0, False),
        ("hello", 1, True),
        ("hello", 2, True),
    ]
    assert {each["member"]["inc"] for each in heard[:3]} == {"i"}
    assert heard[3]["type"] == "beat"


def test_what_is_queued_while_there_is_no_hub_leaves_later_in_order():
    frames = []

    def handler(connection, number):
        connection.recv()
        connection.send(WELCOME)
        with contextlib.suppress(Exception):
            while True:
                frames.append(json.loads(connection.recv()))

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    client = client_of(port)
    for generation in range(1, 4):
        client.send(Fail(generation=generation, inc="i", reason="why"))
    eventually(lambda: "nothing listens there" in str(client.lost_error()), "it has tried")
    assert client.lost_for_s > 0
    with serve(lambda connection: handler(connection, 1), "127.0.0.1", port, ping_interval=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert client.wait(Welcome, timeout_s=LONG_S) is not None
        client.send(Leave(generation=3, inc="i"))
        assert client.close()
        eventually(lambda: frames and frames[-1]["type"] == "leave", "the last frame left before the end")
        server.shutdown()
        thread.join()
    assert [each["generation"] for each in frames if each["type"] == "fail"] == [1, 2, 3]


def test_a_hub_that_never_welcomes_counts_as_lost():
    over = threading.Event()
    with scripted(lambda connection, number: over.wait(LONG_S)) as port:
        client = client_of(port, patience_s=0.5)
        eventually(lambda: client.lost_for_s > 0.5, "it is lost, although its pings are answered")
        with pytest.raises(
            LaunchError, match=rf"The hub at 127\.0\.0\.1:{port} has not been heard for .*patience_s=0\.5"
        ):
            raise client.lost_error()
        over.set()
        assert client.close()


def test_a_client_that_was_frozen_itself_keeps_its_connection(tmp_path):
    with service(tmp_path) as hub, workers(hub.port, "a", patience_s=0.5) as (a,):
        trained(a)
        woken = threading.Event()
        a.client._loop.call_soon_threadsafe(lambda: (time.sleep(0.8), woken.set()))
        eventually(lambda: a.client.lost_for_s > 0.5, "the hub was not heard for long")
        assert woken.wait(LONG_S)
        eventually(lambda: a.client.lost_for_s == 0, "it is heard again")
        a.client.send(Checkpointed(generation=a.generation, inc=a.inc, step=1, name="n"))
        a.next(Pointed)
        assert a.num_hellos == 1


def test_the_time_in_which_a_process_was_frozen_does_not_count_as_time_without_the_hub():
    slept_s = [0.0]
    client = client_of(closed_port(), clock=lambda: time.monotonic() + slept_s[0])
    slept_s[0] = 10 * PATIENCE_S
    assert client.lost_for_s < PATIENCE_S
    assert client.close()


def test_a_text_that_is_too_long_is_cut_and_arrives(tmp_path):
    with service(tmp_path) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        a.client.send(Trouble(generation=a.generation, inc=a.inc, step=1, text="failed " + "x" * FRAME_LIMIT_BYTES))
        end = a.next(End)
        assert end.reason.startswith("failed xxx")
        assert len(end.reason) == TEXT_LIMIT


def test_a_wrong_token_is_told_once_with_what_to_type(tmp_path):
    frames: list[FromHub] = []
    with service(tmp_path) as hub:
        client = client_of(hub.port, token="guess", on_frame=frames.append)
        refused = client.wait(Refused, timeout_s=LONG_S)
        assert refused is not None
        assert frames == [refused]
        with pytest.raises(LaunchError) as told:
            client.wait(Go, timeout_s=LONG_S)
        assert f"The hub at 127.0.0.1:{hub.port} does not take this worker: the token in RAGTAG_TOKEN" in str(
            told.value
        )
        assert "export RAGTAG_TOKEN=" in str(told.value)
        assert "guess" not in str(told.value)
        assert client.error is told.value
        client.send(beat())
        assert client.close()


@pytest.mark.parametrize("token", ["", "two words", "ümlaut", "line\nbreak"])
def test_a_token_that_cannot_be_sent_is_refused_before_connecting(token):
    with pytest.raises(SettingError, match="RAGTAG_TOKEN"):
        client_of(1, token=token)


def test_another_version_is_refused_with_both(tmp_path):
    with service(tmp_path) as hub, workers(hub.port, "a", version="0.0-other") as (a,):
        a.next(Refused)
        with pytest.raises(LaunchError, match=rf"ragtag 0\.0-other, this run ragtag {VERSION}"):
            a.client.wait(Go, timeout_s=LONG_S)


def test_another_service_on_that_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        client = client_of(listener.getsockname()[1])
        for answer in (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH\r\n"):
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)
        expected = ("HTTP status 404", "did not receive a valid HTTP response")
        eventually(lambda: any(each in str(client.lost_error()) for each in expected), "it says what was there")
        assert client.error is None
        assert client.close()


@pytest.mark.parametrize("callback", ["on_frame", "beat", "hello"])
def test_a_mistake_in_a_callback_ends_the_client_instead_of_being_tried_again(callback):
    def mistake(*_):
        raise OSError("a mistake")

    def handler(connection, number):
        with contextlib.suppress(Exception):
            connection.send(WELCOME)
            connection.recv()
            connection.recv()

    with scripted(handler) as port:
        client = client_of(port, **{callback: mistake})
        with pytest.raises(RagtagError, match=f"`{callback}`.*a mistake"):
            client.wait(Go, timeout_s=LONG_S)
        assert client.close()


def test_frames_are_told_on_the_clients_own_thread():
    threads = []

    def handler(connection, number):
        connection.recv()
        connection.send(WELCOME)
        with contextlib.suppress(Exception):
            connection.recv()

    with scripted(handler) as port:
        client = client_of(port, on_frame=lambda frame: threads.append(threading.current_thread().name))
        assert client.wait(Welcome, timeout_s=LONG_S) is not None
        assert client.close()
    assert threads == ["ragtag-hub"]


def test_no_thread_and_no_handle_is_left(tmp_path):
    def handles() -> dict[str, str]:
        links = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links[name] = os.readlink(f"/proc/self/fd/{name}")
        return links

    with service(tmp_path) as hub:
        # What earlier tests have left to the collector.
        gc.collect()
        before = handles(), threading.active_count()
        for _ in range(3):
            with workers(hub.port, "a", "b"):
                pass
        # The hub closes its ends on its own time.
        eventually(lambda: set(handles().values()) <= set(before[0].values()), "all handles closed")
        assert threading.active_count() == before[1]


def test_the_client_does_not_import_torch():
    script = (
        "import ragtag.hub.client, ragtag.hub.local, sys; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_mailbox_gives_the_oldest_of_the_kinds_asked_for():
    mailbox = Mailbox()
    frames = [Pointed(step=step, name="n", moved=True) for step in (1, 2)]
    for frame in (frames[0], Started(generation=1), frames[1]):
        mailbox.put(frame)
    assert mailbox.wait(Started, timeout_s=0) == Started(generation=1)
    assert mailbox.wait(Started, timeout_s=0.001) is None
    assert [mailbox.wait(Go, Pointed, timeout_s=0) for _ in range(2)] == frames
    timer = threading.Timer(0.01, mailbox.put, [frames[0]])
    timer.start()
    assert mailbox.wait(Pointed, timeout_s=LONG_S) is frames[0]
    mailbox.fail(LaunchError("over"))
    with pytest.raises(LaunchError, match="over"):
        mailbox.wait(Pointed, timeout_s=LONG_S)


class Answering:
    """A worker of a `LocalHub` that does what the rules expect."""

    def __init__(self, hub: LocalHub, name: str, expected: int = 2) -> None:
        self.inc, self.expected = name, expected
        self.generation, self.has_state = 0, False
        self.client = hub.client(self.hello, beat=self.beat, on_frame=self.hear)
        self.client.connect()

    def hello(self) -> Hello:
        member = Member(inc=self.inc, name=self.inc, host="h", address="127.0.0.1", store_port=1)
        return Hello(
            run="run",
            version="0",
            member=member,
            generation=self.generation,
            has_state=self.has_state,
            expected=self.expected,
        )

    def beat(self) -> Beat:
        return Beat(generation=self.generation, inc=self.inc, step=1, doing="forward", doing_s=0.0)

    def hear(self, frame: FromHub) -> None:
        if isinstance(frame, Prep) and self.inc in frame.members:
            self.client.send(Join(generation=frame.generation, inc=self.inc, has_state=self.has_state))
        elif isinstance(frame, Go) and self.inc in [member.inc for member in frame.members]:
            self.generation = frame.generation
            self.client.send(Ready(generation=frame.generation, inc=self.inc))
        elif isinstance(frame, Started):
            self.has_state = True

    def go(self) -> Go:
        return [frame for frame in self.client.received if isinstance(frame, Go)][-1]

    def members(self) -> list[str]:
        return [member.inc for member in self.go().members]


class TestLocalHub:
    def test_two_begin_and_one_that_dies_is_left_behind(self):
        hub = LocalHub()
        a, b = Answering(hub, "a"), Answering(hub, "b")
        assert a.has_state
        assert b.has_state
        assert a.go() == b.go()
        assert a.go().action == "start"
        b.client.cut()
        assert (a.members(), a.go().action) == (["a"], "redo")
        assert a.client.wait(Welcome, timeout_s=0) is not None

    def test_a_frozen_one_is_evicted_by_the_clock_and_hears_so_when_it_wakes(self):
        hub = LocalHub(patience_s=10.0)
        a, b = Answering(hub, "a"), Answering(hub, "b")
        b.client.freeze()
        hub.pass_time(7.0)
        assert len(a.members()) == 2
        hub.pass_time(4.0)
        assert a.members() == ["a"]
        assert b.client.lost_for_s == pytest.approx(11.0)
        assert "no sign of life from b (h)" in a.go().reason
        assert len(b.members()) == 2
        b.client.thaw()
        assert b.members() == ["a"]
        assert b.client.lost_for_s == 0.0

    def test_after_a_restart_all_are_asked_again_under_a_new_epoch(self):
        hub = LocalHub()
        a, b = Answering(hub, "a"), Answering(hub, "b")
        first = a.go()
        hub.stop()
        hub.pass_time(5.0)
        assert a.client.lost_for_s == 5.0
        a.client.send(Fail(generation=first.generation, inc="a", reason="old news"))
        hub.start()
        assert a.client.lost_for_s == 0.0
        assert a.go() == b.go()
        assert a.go().generation > first.generation
        assert sorted(a.members()) == ["a", "b"]

    def test_a_newcomer_is_asked_in_and_one_of_another_run_refused(self):
        hub = LocalHub()
        a = Answering(hub, "a", expected=1)
        b = Answering(hub, "b", expected=1)
        assert a.members() == ["a", "b"]
        b.client.close()
        assert a.members() == ["a"]
        other = LocalHub(run="other", version="1")
        c = Answering(other, "c", expected=1)
        with pytest.raises(LaunchError, match="does not take this worker"):
            c.client.wait(Go, timeout_s=0)
        assert isinstance(c.client.received[0], Refused)
        assert not c.client.connected

    def test_nobody_left_ends_the_run(self):
        hub = LocalHub(patience_s=10.0)
        a, b = Answering(hub, "a"), Answering(hub, "b")
        late = Answering(hub, "late", expected=1)
        for lost in (a, b):
            lost.client.cut()
        hub.pass_time(200.0)
        assert isinstance(late.client.received[-1], End | Prep | Go)
        assert hub.state.end is not None or late.has_state
