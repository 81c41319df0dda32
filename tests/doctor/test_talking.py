"""Doctors that talk over real sockets of this machine, and what strangers and impostors get."""

import json
import socket
import struct
import threading
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.within import within
from ragtag.doctor.bounded import each
from ragtag.doctor.caller import CALL_TIMEOUT_S, call
from ragtag.doctor.examine import examine
from ragtag.doctor.frames import (
    AskCalls,
    AskDoor,
    AskFacts,
    Called,
    Door,
    Echo,
    Facts,
    FrameError,
    Target,
    TokenError,
    greet_listener,
    receive,
    send,
)
from ragtag.doctor.listener import MOST_TARGETS, Listener, bind
from tests.doctor.cases import HEALTHY, OTHER, changed


@pytest.fixture
def start():
    listeners = []

    def start(facts=HEALTHY, *, token="secret", clock=time.time, event=lambda text: None):
        listener = Listener(bind("127.0.0.1", 0), token=token, facts=facts, host=facts.host, clock=clock, event=event)
        listeners.append(listener)
        return listener

    yield start
    for listener in listeners:
        listener.close()


def target(listener, name="beta"):
    return Target(name, "127.0.0.1", listener.port, True)


def test_a_call_gives_facts_and_how_it_got_there(start):
    listener = start(OTHER)
    way, conversation = call("alpha", target(listener), "secret")
    assert (way.ok, way.address, way.port, way.source_address) == (True, "127.0.0.1", listener.port, "127.0.0.1")
    assert way.latency_s is not None
    assert way.latency_s > 0
    assert conversation.host == "beta"
    assert conversation.ask(AskFacts(), Facts, timeout_s=5).facts == OTHER
    conversation.close()


def test_another_token_is_turned_away_and_seen(start):
    seen = []
    listener = start(event=seen.append)
    way, conversation = call("alpha", target(listener), "guess")
    assert (way.stage, conversation) == ("token", None)
    deadline_s = time.monotonic() + 5
    while not seen and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert seen == ["127.0.0.1 called with another token and was turned away"]
    assert listener.num_callers == 0


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 1 << 31) + b"x",
        struct.pack("!I", 900) + b"[" * 900,
        struct.pack("!I", 11) + b'{"type":1}}',
        json.dumps({"type": "AskFacts"}).encode(),
    ],
)
def test_a_stranger_gets_a_challenge_and_nothing_else(start, words):
    listener = start()
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as stranger:
        stranger.sendall(words)
        got = b""
        try:
            while more := stranger.recv(1 << 16):
                got += more
        except ConnectionResetError:
            pass  # it hung up with our words unread
    assert b"Welcome" not in got
    assert b"alpha" not in got
    assert len(got) < 200


def test_an_impostor_that_takes_any_token_is_found_out():
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            connection, _ = impostor.accept()
            with connection:
                deadline_s = time.monotonic() + 5
                for word in (
                    {"type": "Challenge", "protocol": 1, "nonce": "0"},
                    {"type": "Welcome", "proof": "f", "host": "b"},
                ):
                    content = json.dumps(word).encode()
                    connection.sendall(struct.pack("!I", len(content)) + content)
                receive(connection, dict, deadline_s=deadline_s)

        thread = threading.Thread(target=pretend)
        thread.start()
        with socket.create_connection(impostor.getsockname(), timeout=5) as connection, pytest.raises(TokenError):
            greet_listener(connection, "secret", deadline_s=time.monotonic() + 5)
        thread.join(5)


def test_who_answers_nothing_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin_s = time.monotonic()
        way, _ = call("alpha", Target("beta", "127.0.0.1", silent.getsockname()[1], True), "secret", timeout_s=0.5)
        assert time.monotonic() - begin_s < CALL_TIMEOUT_S
    assert (way.stage, way.error) == ("answer", "no answer in time")


def test_where_nothing_listens_is_said_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        way, _ = call("alpha", Target("beta", "127.0.0.1", free.getsockname()[1], True), "secret")
    assert (way.stage, way.refused) == ("connect", True)


def test_a_door_only_echoes(start):
    _, conversation = call("alpha", target(start()), "secret")
    door = conversation.ask(AskDoor(), Door, timeout_s=5)
    assert conversation.ask(AskDoor(), Door, timeout_s=5) == door, "one door a conversation"
    way, at_door = call("alpha", Target("beta", door.address, door.port, False), "secret")
    assert way.ok
    assert at_door.ask(Echo("hello"), Echo, timeout_s=5) == Echo("hello")
    for request in (AskFacts(), AskDoor(), AskCalls(())):
        with pytest.raises(FrameError, match="only echoes"):
            at_door.ask(request, Facts, timeout_s=5)
    at_door.close()
    conversation.close()


def test_a_door_is_closed_after_its_conversation(start):
    _, conversation = call("alpha", target(start()), "secret")
    door = conversation.ask(AskDoor(), Door, timeout_s=5)
    conversation.close()
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        way, again = call("alpha", Target("beta", door.address, door.port, False), "secret")
        if not way.ok:
            break
        again.close()
    assert way.stage == "connect"


def test_a_request_for_too_many_calls_is_refused(start):
    _, conversation = call("alpha", target(start()), "secret")
    with pytest.raises(FrameError, match="65 targets"):
        conversation.ask(AskCalls((Target("x", "127.0.0.1", 1, True),) * (MOST_TARGETS + 1)), Called, timeout_s=5)
    conversation.close()


def test_three_hosts_are_examined_in_both_directions(start):
    beta = start(OTHER)
    gamma = start(changed(OTHER, host="gamma"), clock=lambda: time.time() + 7200)
    found = []
    examination = examine("alpha", [("127.0.0.1", beta.port), ("127.0.0.1", gamma.port)], "secret", found=found.append)
    assert [facts.host for facts in examination.hosts] == ["beta", "gamma"]
    assert all(way.ok for way in examination.ways)
    assert {(way.source, way.target) for way in examination.ways if not way.control} == {
        (one, other) for one in ("alpha", "beta", "gamma") for other in ("alpha", "beta", "gamma") if one != other
    }
    assert tuple(found) == examination.ways
    offsets = {clock.host: clock.offset_s for clock in examination.clocks}
    assert offsets["gamma"] == pytest.approx(7200, abs=5)
    assert offsets["beta"] == pytest.approx(0, abs=5)


def test_hosts_that_call_themselves_alike_are_told_apart(start):
    port = start(HEALTHY).port
    examination = examine("alpha", [("127.0.0.1", port)], "secret")
    name = f"alpha (127.0.0.1:{port})"
    assert [facts.host for facts in examination.hosts] == [name]
    assert {way.target for way in examination.ways} == {name, "alpha"}


def test_a_host_that_cannot_be_reached_is_called_by_the_others_too(start):
    beta = start(OTHER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        ways = examine("alpha", [("127.0.0.1", beta.port), ("127.0.0.1", port)], "secret").ways
    failed = {(way.source, way.target, way.port) for way in ways if not way.ok}
    assert failed == {("alpha", f"127.0.0.1:{port}", port), ("beta", f"127.0.0.1:{port}", port)}


def test_facts_of_an_older_or_newer_doctor_can_be_read():
    document = {"host": "old", "ragtag": "0.0.9", "tomorrow": [1, 2]}
    facts = msgspec.json.decode(json.dumps(document), type=type(HEALTHY))
    assert (facts.host, facts.ragtag, facts.torch.version) == ("old", "0.0.9", "")


@given(st.text(max_size=300), st.integers(1, 50))
def test_frames_come_back_whole_however_they_are_cut(content, size):
    one, other = socket.socketpair()
    with one, other:
        deadline_s = time.monotonic() + 20
        send(one, Echo(content), deadline_s=deadline_s)
        data = other.recv(1 << 16)
        for begin in range(0, len(data), size):
            other.sendall(data[begin : begin + size])
        assert receive(one, Echo, deadline_s=deadline_s) == Echo(content)


def test_a_frame_over_the_limit_is_not_read():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(struct.pack("!I", 1025))
        with pytest.raises(FrameError, match="1025 bytes"):
            receive(other, Echo, deadline_s=time.monotonic() + 5, limit_bytes=1024)


def test_what_blocks_is_left_behind():
    forever = threading.Event()
    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.1, forever.wait)
    assert time.monotonic() - begin_s < 5
    forever.set()
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])


def test_each_keeps_the_order():
    assert each(range(200), lambda number: number * number) == [number * number for number in range(200)]
    assert each([], str) == []
    with pytest.raises(ZeroDivisionError):
        each([1, 0], lambda number: 1 // number)
