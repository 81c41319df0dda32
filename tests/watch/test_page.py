"""The page's server, asked by plain sockets: who is let in, and what viewers that behave badly can do."""

import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import example_log
import pytest

from ragtag.cli.page_process import PageProcess
from ragtag.core.errors import LaunchError
from ragtag.watch.live import Live, message
from ragtag.watch.page import MOST_VIEWERS
from ragtag.watch.reader import Follower
from ragtag.watch.server import MOST_CONNECTIONS, server

TOKEN = "a-token"
SOURCE = Path(__file__).parents[2] / "src"


class Served:
    def __init__(self, log, listener, running):
        self.log, self.port, self.server = log, listener.getsockname()[1], running

    def ask(self, path="/state", *, method="GET", token=TOKEN, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, headers={**bearer, **{k.replace("_", "-"): v for k, v in headers.items()}})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content

    def stream(self, path="/events"):
        """Return a connection on which the page's events come."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        return connection


@contextmanager
def served(log, **limits):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        running = server(log, listener, TOKEN, interval_s=0.05, **limits)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(log, listener, running)
        finally:
            running.should_exit = running.force_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def page(tmp_path):
    log = tmp_path / "log.jsonl"
    example_log.append(log, example_log.events(100))
    with served(log) as page:
        yield page


def received(connection, until):
    content = b""
    while until not in content:
        more = connection.recv(1 << 16)
        assert more, content[-300:]
        content += more
    return content


def eventually(holds, timeout_s=20.0):
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_without_the_token_nothing_is_shown(page):
    for path in ("/", "/page.js", "/page.css", "/state", "/events", "/nothing"):
        for token in ("", "another"):
            answer, content = page.ask(path, token=token)
            assert answer.status == 403, path
            assert content.count(b"\n") == 1
            assert b"`ragtag launch`" in content
            assert b"blue-otter" not in content
    answer, _ = page.ask("/?token=another", token="")
    assert answer.status == 403


def test_the_token_in_the_address_becomes_a_cookie(page):
    answer, _ = page.ask(f"/?token={TOKEN}", token="")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie, *attributes = (each.strip() for each in answer.headers["Set-Cookie"].split(";"))
    assert {each.lower() for each in attributes} >= {"httponly", "samesite=strict", "path=/"}
    answer, content = page.ask("/", token="", Cookie=f"other=1; {cookie}")
    assert answer.status == 200
    assert b"<title>ragtag</title>" in content
    assert page.ask("/", token="", Cookie=cookie + "x")[0].status == 403


def test_a_link_on_another_site_is_followed_once_more_by_the_page_itself(page):
    answer, _ = page.ask("/", token="", Sec_Fetch_Site="cross-site")
    assert (answer.status, answer.headers["Refresh"]) == (403, "0; url=/")
    assert page.ask("/", token="", Sec_Fetch_Site="same-origin")[0].headers["Refresh"] is None


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "evil.example:127", "", "127.0.0.1.nip.io"]
)
def test_another_sites_name_is_refused(page, host):
    assert page.ask("/state", Host=host)[0].status == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:4", "[::1]:80", "10.1.2.3", socket.gethostname()])
def test_own_names_are_answered(page, host):
    assert page.ask("/page.css", Host=host)[0].status == 200


def test_answers_let_the_browser_load_and_keep_nothing(page):
    for path in ("/", "/page.js", "/state", "/nothing"):
        headers = page.ask(path)[0].headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "server" not in headers
    assert page.ask("/", method="POST")[0].status == 405


def test_the_page_needs_nothing_from_elsewhere(page):
    for path in ("/", "/page.js", "/page.css"):
        content = page.ask(path)[1].decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in content
        assert "https:" not in content
        assert "@import" not in content
    assert len(page.ask("/page.js")[1].splitlines()) < 400


def test_the_state_is_that_of_the_whole_log(page):
    drawn = json.loads(page.ask()[1])
    assert (drawn["now"]["step"], drawn["run"]["name"]) == (100, "blue-otter")
    example_log.append(page.log, example_log.events(101)[-1:])
    eventually(lambda: json.loads(page.ask()[1])["now"]["step"] == 101)


def test_a_viewer_gets_everything_and_then_what_changes(page):
    with page.stream() as connection:
        first = received(connection, b'"now":')
        assert b'"curves.loss.0":' in first
        example_log.append(page.log, example_log.events(101)[-1:])
        then = received(connection, b'"step":101')
        assert b'"decisions":' not in then.split(b'"server_t"')[-1]
        assert b'"run":' not in then.split(b'"server_t"')[-1]


def test_sections_put_together_are_the_state(tmp_path):
    log = tmp_path / "log.jsonl"
    live, held, sent = Live(log), {}, {}
    for first in range(0, 450, 150):
        example_log.append(log, example_log.events(450)[first : first + 150])
        live.refresh()
        event = message(live.sections, sent)
        sent = live.sections
        held |= json.loads(event.removeprefix(b"data: "))["sections"]
    for name in ("loss", "eta"):
        blocks = [held[f"curves.{name}.{number}"] for number in range(held[f"curves.{name}.blocks"])]
        curve = live.drawn["curves"][name]
        assert [tuple(point) for block in blocks for point in block] == list(zip(curve["steps"], curve["values"]))
    assert held["now"] == live.drawn["now"]
    assert len(message(live.sections, sent)) < 100, "nothing has changed"


def test_a_log_that_is_not_there_yet_is_shown_when_it_is(tmp_path):
    log = tmp_path / "later" / "log.jsonl"
    with served(log) as page:
        assert json.loads(page.ask()[1])["log"]["written_t"] is None
        log.parent.mkdir()
        example_log.append(log, example_log.events(5))
        eventually(lambda: json.loads(page.ask()[1])["now"]["step"] == 5)


def test_many_viewers_are_told_that_there_are_too_many(page):
    streams = [page.stream() for _ in range(MOST_VIEWERS)]
    for each in streams:
        received(each, b'"now":')
    answer, content = page.ask("/events")
    assert answer.status == 503
    assert b"Close one of them" in content
    assert page.ask()[0].status == 200
    streams.pop().close()

    def has_a_place():
        with page.stream() as another:
            return b" 200 " in received(another, b"\r\n")

    eventually(has_a_place)
    for each in streams:
        each.close()


def test_a_viewer_that_hangs_is_let_go_and_costs_the_others_nothing(tmp_path):
    log = tmp_path / "log.jsonl"
    events = example_log.events(100)
    example_log.append(log, events)
    with served(log, patience_s=1.0) as page:
        hanging = []
        for _ in range(4):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", page.port))
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-token\r\n\r\n")
            hanging.append(connection)
        eventually(lambda: len(page.server.server_state.connections) >= 4)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        number, began_s = 100, time.monotonic()
        waiting = set(page.server.server_state.connections)
        while page.server.server_state.connections & waiting:
            assert time.monotonic() - began_s < 30
            number += 1
            example_log.append(log, example_log.events(number)[-1:])
            answer, _ = page.ask()
            assert answer.status == 200
            buffered = [each.transport.get_write_buffer_size() for each in page.server.server_state.connections]
            assert max(buffered, default=0) < 400_000
            time.sleep(0.02)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 60_000
        for each in hanging:
            each.close()


def test_a_flood_of_connections_keeps_nobody_out(page):
    with page.stream() as viewer:
        received(viewer, b'"now":')
        flood = []
        for number in range(200):
            each = socket.create_connection(("127.0.0.1", page.port), timeout=20)
            if number % 2:
                each.sendall(b"GET /state HTTP/1.1\r\nHost: local")
            flood.append(each)
            if number % 50 == 0:
                assert page.ask()[0].status == 200
        assert page.ask()[0].status == 200
        eventually(
            lambda: len(page.server.server_state.connections) <= MOST_CONNECTIONS, timeout_s=8
        )  # not by patience
        example_log.append(page.log, example_log.events(101)[-1:])
        received(viewer, b'"step":101')
        for each in flood:
            each.close()


def test_who_connects_and_asks_for_nothing_is_let_go(tmp_path):
    with (
        served(tmp_path / "log.jsonl", patience_s=0.3) as page,
        socket.create_connection(("127.0.0.1", page.port), timeout=20) as silent,
    ):
        silent.sendall(b"GET / HTTP/1.1\r\n")
        try:
            assert silent.recv(10) == b""
        except ConnectionResetError:
            pass
        eventually(lambda: not page.server.server_state.connections)


def page_process(log, **arguments):
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return PageProcess(log=log, address="127.0.0.1", port=0, token=TOKEN, environ=environ, **arguments)


def asked_of(process, path="/state"):
    """Ask while the launcher's loop runs."""
    port = int(process.url.rpartition("/")[0].rpartition(":")[2])
    found = []

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        found.append(connection.getresponse().status)
        connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    end_s = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < end_s:
        process.look_after(0.02)
    return found


def test_the_process_starts_when_somebody_looks_and_again_when_it_was_killed(tmp_path):
    said = []
    process = page_process(tmp_path / "log.jsonl", tell=said.append)
    try:
        process.look_after(0.05)
        assert process.pid is None, "nobody looks"
        assert asked_of(process) == [200]
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        process.look_after(0.2)
        assert asked_of(process) == [200]
        assert process.pid != first
    finally:
        process.close()
    assert not said
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(process.url.rpartition("/")[0].rpartition(":")[2])))


def test_a_page_that_cannot_be_served_is_given_up(tmp_path, monkeypatch):
    said = []
    process = page_process(tmp_path / "log.jsonl", tell=said.append)
    process._command = ["false"]
    with socket.create_connection(("127.0.0.1", int(process.url.rpartition("/")[0].rpartition(":")[2]))):
        end_s = time.monotonic() + 20
        while not said and time.monotonic() < end_s:
            process.look_after(0.01)
    process.close()
    assert said == ["the page's process ended with status 1, 5 times in 60 s; the page is given up, the run goes on"]


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"The page cannot listen on 127\.0\.0\.1, port {port}: .* in use"):
            PageProcess(log=Path("x"), address="127.0.0.1", port=port, token="t", environ={})


def test_a_long_log_is_drawn_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ragtag.watch.live._READ_BYTES", 50_000)
    log = tmp_path / "log.jsonl"
    example_log.append(log, example_log.events(2000))
    live = Live(log)
    assert not live.refresh(0.0)
    part = live.drawn["now"]["step"]
    assert 0 < part < 2000
    while not live.refresh(0.01):
        pass
    assert live.drawn["now"]["step"] == 2000
    assert len(Follower(log).new()) > 2000
