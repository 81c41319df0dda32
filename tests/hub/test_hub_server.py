import errno
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tests.hub.running import (
    LONG_S,
    TOKEN,
    VERSION,
    Process,
    Worker,
    answer_to,
    eventually,
    raw,
    service,
    trained,
    workers,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from ragtag.core.errors import LaunchError
from ragtag.hub.connection import AwakeClock
from ragtag.hub.door import Limits, SeldomLog
from ragtag.hub.frames import FRAME_LIMIT_BYTES, Beat, Checkpointed, End, Hello, Member, Pointed, Prep, encode
from ragtag.hub.journal import FILE_NAME, JournalError
from ragtag.hub.peer import Pace
from ragtag.hub.server import listen_on


def round_trip(worker: Worker, step: int) -> Pointed:
    """From the worker to the hub, through its rules and its journal, and back."""
    worker.client.send(Checkpointed(generation=worker.generation, inc=worker.inc, step=step, name=f"step-{step}"))
    pointed = worker.next(Pointed)
    assert pointed == Pointed(step=step, name=f"step-{step}", moved=True)
    return pointed


def wires(port: int, *, token: str = TOKEN):
    """A WebSocket without any client of ours."""
    return connect(
        f"ws://127.0.0.1:{port}/",
        additional_headers={"Authorization": f"Bearer {token}"},
        compression=None,
        proxy=None,
        ping_interval=None,
        max_size=None,
    )


def hello(inc: str = "stranger") -> bytes:
    member = Member(inc=inc, name=inc, host="here", address="127.0.0.1", store_port=1)
    return encode(Hello(run="r", version=VERSION, member=member, generation=0, has_state=False))


def kind_of(connection) -> str:
    """Of the next frame."""
    return json.loads(connection.recv(timeout=LONG_S))["type"]


def closed_with(connection) -> int | None:
    """Read until the hub closes; the close code."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            connection.recv(timeout=LONG_S)
    return closed.value.rcvd.code if closed.value.rcvd is not None else None


def upgrade(token: str, path: str = "/") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: Bearer {token}\r\n\r\n"
    ).encode()


def test_two_workers_form_the_first_generation_and_a_third_joins(tmp_path):
    with service(tmp_path) as hub, workers(hub.port, "a", "b") as (a, b):
        go = trained(a, b)
        assert (go.action, go.num_veterans, {member.name for member in go.members}) == ("start", 0, {"a", "b"})
        with workers(hub.port, "c"):
            second = a.next_go()
        assert second.generation > go.generation
        assert second.num_veterans == 2
        assert [member.name for member in second.members][2] == "c"


def test_health_is_json_for_those_with_the_token(tmp_path):
    with service(tmp_path) as hub, workers(hub.port, "a", "b") as (a, b):
        go = trained(a, b)
        head, _, body = answer_to(hub.port, upgrade(TOKEN, "/health")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        health = json.loads(body)
        assert (health["run"], health["epoch"], health["generation"]) == ("r", 1, go.generation)
        assert [member["name"] for member in health["members"]] == [member.name for member in go.members]
        assert health["connected"] == sorted([a.inc, b.inc])
        assert answer_to(hub.port, upgrade("guess", "/health")).startswith(b"HTTP/1.1 401 ")
        assert answer_to(hub.port, upgrade(TOKEN, "/other")).startswith(b"HTTP/1.1 404 ")


def test_a_wrong_token_gets_401_and_one_line_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ragtag.hub")
    with service(tmp_path, limits=Limits(log_every_s=1000.0)) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        for request in (upgrade(""), upgrade("guess"), upgrade(TOKEN + "x"), upgrade(TOKEN[:-1])) * 5:
            assert answer_to(hub.port, request).startswith(b"HTTP/1.1 401 ")
        assert answer_to(hub.port, b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n").startswith(b"HTTP/1.1 401 ")
        twice = upgrade(TOKEN).replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert answer_to(hub.port, twice).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(InvalidStatus, match="401"), wires(hub.port, token="guess"):
            pass
        round_trip(a, 1)
    lines = [record.getMessage() for record in caplog.records if "token" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("refused 127.0.0.1:")
    assert TOKEN not in caplog.text


GARBAGE = {
    "nothing": b"",
    "zeros": bytes(4096),
    "noise": b"\xff\xfe\x00garbage\r\n\r\n" * 50,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "endless line": b"GET /" + b"a" * 200_000,
    "endless headers": b"GET / HTTP/1.1\r\n" + b"Header: value\r\n" * 5000,
    "body": b"POST / HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n",
    "no websocket": f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(),
    "bad frame": upgrade(TOKEN) + b"\xff" * 64,
}


def test_garbage_is_refused_and_disturbs_nobody(tmp_path, caplog):
    with service(tmp_path, limits=Limits(opening_s=0.3)) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        for step, (name, data) in enumerate(GARBAGE.items(), 1):
            sock = raw(hub.port)
            try:
                sock.sendall(data)
            except ConnectionError:
                pass  # refused before it was all sent
            round_trip(a, step)
            try:
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass
            sock.close()
            assert a.num_hellos == 1, name
    assert "before it had said Hello" in caplog.text


def test_fifty_dawdlers_keep_nobody_out(tmp_path):
    half = upgrade(TOKEN)
    with service(tmp_path, limits=Limits(strangers=8, opening_s=100.0)) as hub:
        dawdlers = [raw(hub.port, half[: 1 + place % (len(half) - 1)]) for place in range(50)]
        with workers(hub.port, "a") as (a,):
            trained(a)
            dawdlers += [raw(hub.port, half[:30]) for _ in range(50)]
            for dawdler in dawdlers[-4:]:
                dawdler.sendall(half[30:40])
            round_trip(a, 1)
            assert a.num_hellos == 1
    # Nor did the hub's own end wait for those that are still there.
    for dawdler in dawdlers:
        dawdler.close()


def test_dawdlers_are_dropped_in_time(tmp_path):
    with service(tmp_path, limits=Limits(opening_s=0.2)) as hub:
        # Without a whole request, and with one but no Hello.
        for data in (b"", b"GET / HT", upgrade(TOKEN)):
            with raw(hub.port, data) as sock:
                sock.settimeout(LONG_S)
                while sock.recv(65536):
                    pass


def test_a_flood_of_connections_leaves_a_worker_its_round_trip_and_no_handles(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ragtag.hub")
    handles = len(os.listdir("/proc/self/fd"))
    over = threading.Event()

    def flood(port: int) -> None:
        while not over.is_set():
            raw(port, b"GET / HTTP/1.1\r\nAuthorization: Bearer guess\r\n\r\n").close()
            raw(port, b"GET").close()

    with service(tmp_path, limits=Limits(strangers=16)) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        floods = [threading.Thread(target=flood, args=(hub.port,)) for _ in range(2)]
        for each in floods:
            each.start()
        began_s = time.monotonic()
        for step in range(1, 51):
            round_trip(a, step)
        over.set()
        for each in floods:
            each.join()
        took_s = time.monotonic() - began_s
        assert a.num_hellos == 1
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(lines) <= took_s + 2
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= handles, "all handles closed")


def test_more_workers_than_allowed_are_turned_away(tmp_path):
    with service(tmp_path, limits=Limits(workers=1)) as hub, wires(hub.port) as first:
        first.send(hello("one"))
        assert kind_of(first) == "welcome"
        with pytest.raises(InvalidStatus, match="503"), wires(hub.port):
            pass


WRONG_FRAMES = {
    "oversized": (b'"' + b"x" * FRAME_LIMIT_BYTES + b'"', 1009),
    "unknown": (b'{"type":"reboot"}', 1008),
    "extra field": (encode(Beat(generation=1, inc="stranger", step=1, doing="", doing_s=0))[:-1] + b',"x":1}', 1008),
    "no json": (b"\x00\xff", 1008),
    "nested": (b'{"type":"hello","member":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", 1008),
    "another's": (encode(Beat(generation=1, inc="somebody else", step=1, doing="", doing_s=0)), 1008),
}


@pytest.mark.parametrize("after_hello", [False, True])
def test_a_wrong_frame_closes_that_connection_only(tmp_path, after_hello):
    with service(tmp_path) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        for step, (name, (frame, code)) in enumerate(WRONG_FRAMES.items(), 1):
            with wires(hub.port) as connection:
                if after_hello:
                    connection.send(hello())
                    assert kind_of(connection) == "welcome"
                connection.send(frame)
                assert closed_with(connection) == code, name
            round_trip(a, step)
        assert a.num_hellos == 1


def test_a_hello_that_goes_too_far_is_refused_with_its_reason(tmp_path):
    with service(tmp_path) as hub:
        for wrong in (hello(""), hello("x" * 300), encode(Beat(generation=1, inc="b", step=1, doing="", doing_s=0))):
            with wires(hub.port) as connection:
                connection.send(wrong)
                assert closed_with(connection) == 1008
        other = encode(
            Hello(
                run="another",
                version=VERSION,
                member=Member(inc="i", name="n", host="h", address="127.0.0.1", store_port=1),
                generation=0,
                has_state=False,
            )
        )
        with wires(hub.port) as connection:
            connection.send(other)
            # Sent before the connection ends.
            assert kind_of(connection) == "refused"
            assert closed_with(connection) == 1000


def test_a_worker_that_does_not_read_loses_its_connection_and_nobody_waits(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ragtag.hub")
    limits = Limits(queue_frames=50, frames_per_s=1e6)
    with service(tmp_path, limits=limits) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        with wires(hub.port) as deaf:
            deaf.send(hello("deaf"))
            frame = encode(Checkpointed(generation=1, inc="deaf", step=1, name="x" * 4000))
            with pytest.raises(ConnectionClosed):
                # Each is answered at its full length; far more than the kernel's buffers hold.
                for _ in range(50_000):
                    deaf.send(frame)
            round_trip(a, 1)
    assert "it does not read" in caplog.text


def test_a_newer_connection_of_the_same_worker_replaces_the_older(tmp_path):
    with service(tmp_path) as hub, wires(hub.port) as older:
        older.send(hello("one"))
        older.recv(timeout=LONG_S)
        with wires(hub.port) as newer:
            newer.send(hello("one"))
            assert kind_of(newer) == "welcome"
            closed_with(older)
            newer.send(encode(Checkpointed(generation=1, inc="one", step=1, name="n")))
            while kind_of(newer) != "pointed":
                pass


KILLED_WORKER = textwrap.dedent(
    """
    import os, sys, time
    from tests.hub.running import Worker
    from ragtag.hub.frames import Started
    worker = Worker(int(sys.argv[1]), "killed", expected=3, patience_s=float(sys.argv[2]))
    worker.next(Started)
    if os.fork() == 0:
        # As a loader's worker, that outlives its parent until the test ends.
        os.close(1)
        os.read(0, 1)
        os._exit(0)
    print("training", flush=True)
    time.sleep(100)
    """
)


def test_a_killed_worker_is_noticed_at_once_although_its_child_lives(tmp_path):
    # Far above what the test may take, so that silence cannot be what is noticed.
    patience_s = 40.0
    command = [sys.executable, "-c", KILLED_WORKER]
    with service(tmp_path, patience_s=patience_s) as hub:
        a, b = (Worker(hub.port, name, expected=3, patience_s=patience_s) for name in "ab")
        process = subprocess.Popen(
            [*command, str(hub.port), str(patience_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout.readline() == "training\n"
            go = trained(a, b)
            assert len(go.members) == 3
            for worker in (a, b):
                worker.next(Prep)
            began_s = time.monotonic()
            process.kill()
            prep = a.next(Prep)
            assert time.monotonic() - began_s < patience_s / 4
            assert prep.reason == "killed (here) is gone: its connection closed"
            assert set(prep.members) == {a.inc, b.inc}
            second = b.next_go()
            assert (second.action, [member.name for member in second.members]) == (
                "redo",
                [m.name for m in go.members if m.name != "killed"],
            )
        finally:
            process.kill()
            process.communicate()
            assert a.client.close()
            assert b.client.close()


def test_workers_go_on_after_the_hub_was_killed_and_started_again(tmp_path):
    hub = Process(tmp_path)
    try:
        with workers(hub.port, "a", "b") as (a, b):
            first = trained(a, b)
            round_trip(a, 7)
            status, _ = hub.end(signal.SIGKILL)
            assert status == -signal.SIGKILL
            eventually(lambda: a.client.lost_for_s > 0 and b.client.lost_for_s > 0, "both miss the hub")
            hub.start()
            goes = [a.next_go(), b.next_go()]
            assert goes[0] == goes[1]
            assert goes[0].generation // 1_000_000 == 2 > first.generation // 1_000_000
            assert goes[0].num_veterans == 2
            assert a.client.lost_for_s == 0
            a.client.send(Checkpointed(generation=a.generation, inc=a.inc, step=6, name="older"))
            assert not a.next(Pointed).moved
            assert [a.num_hellos, b.num_hellos] == [2, 2]
        status, printed = hub.end()
        assert status == 0
        assert "Traceback" not in printed
    finally:
        hub.close()


def test_the_process_is_light_alone_and_says_what_is_wrong(tmp_path):
    def run(*arguments: str, token: str = TOKEN) -> tuple[int, str]:
        command = [sys.executable, "-m", "ragtag.hub", "--run-dir", str(tmp_path), "--run", "r", *arguments]
        done = subprocess.run(command, env={**os.environ, "RAGTAG_TOKEN": token}, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    hub = Process(tmp_path)
    try:
        line = hub.popen.stderr.readline()
        while "listening on" not in line:
            assert line
            line = hub.popen.stderr.readline()
        assert line == f"ragtag hub: listening on 127.0.0.1 port {hub.port}\n"
        maps = Path(f"/proc/{hub.popen.pid}/maps").read_text()
        assert "torch" not in maps
        assert "numpy" not in maps
        assert run() == (
            74,
            f"ragtag hub: Another hub is running this run: it has {tmp_path / FILE_NAME} open. A run has "
            "one hub: end that one first, or start this one with another --run-dir.\n",
        )
    finally:
        status, _ = hub.end()
        hub.close()
    assert status == 0
    assert run(token="")[0] == 2
    status, printed = run("--port", str(_taken(busy := listen_on("127.0.0.1", 0))))
    busy.close()
    assert status == 2
    assert "Address already in use" in printed


def _taken(listener) -> int:
    return listener.getsockname()[1]


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1 port 0.*--address"):
        listen_on("192.0.2.1", 0)


def test_a_disk_that_fails_ends_the_run_with_the_last_checkpoint_named(tmp_path, monkeypatch):
    with pytest.raises(JournalError, match="No space left"), service(tmp_path) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        round_trip(a, 3)

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwrite", full)
        a.client.send(Checkpointed(generation=a.generation, inc=a.inc, step=4, name="step-4"))
        end = a.next(End)
        assert end.failed
        assert "No space left on device" in end.reason
        assert "The last checkpoint is 'step-3'" in end.reason
        assert not [frame for frame in a.heard if isinstance(frame, Pointed) and frame.step == 4]


def test_a_restart_reads_what_the_first_hub_wrote(tmp_path):
    with service(tmp_path) as hub, workers(hub.port, "a") as (a,):
        trained(a)
        round_trip(a, 5)
    with service(tmp_path) as hub:
        health = json.loads(answer_to(hub.port, upgrade(TOKEN, "/health")).partition(b"\r\n\r\n")[2])
    assert (health["epoch"], health["checkpoint"]) == (2, "step-5")


def test_time_in_which_the_hub_was_frozen_is_held_against_nobody():
    now_s = 100.0
    clock = AwakeClock(longest_gap_s=0.5, clock=lambda: now_s)
    readings = []
    for later_s in (100.0, 100.25, 100.5, 500.5, 500.75):
        now_s = later_s
        readings.append(clock())
    assert readings == [0.0, 0.25, 0.5, 1.0, 1.25]
    assert clock.missed_s == 399.5


def test_a_frozen_hub_is_left_and_evicts_nobody_when_it_wakes(tmp_path, caplog):
    over = threading.Event()
    with service(tmp_path, patience_s=2.0) as hub, workers(hub.port, "a", "b", patience_s=2.0) as (a, b):
        trained(a, b)
        hub.loop.call_soon_threadsafe(over.wait, LONG_S)
        eventually(lambda: "does not answer" in str(a.client.lost_error()), "it was left")
        eventually(lambda: min(a.client.lost_for_s, b.client.lost_for_s) > 2.0, "the hub was away for long")
        over.set()
        second = [a.next_go(), b.next_go()]
        assert second[0] == second[1]
        assert {member.inc for member in second[0].members} == {a.inc, b.inc}
        round_trip(a, 1)
    assert "the hub itself was frozen for" in caplog.text
    assert "no sign of life" not in caplog.text


def test_one_that_does_not_come_back_to_a_hub_that_was_frozen_is_missed_in_the_end(tmp_path, caplog):
    over = threading.Event()
    with service(tmp_path, patience_s=1.0) as hub, workers(hub.port, "a", "b", patience_s=100.0) as (a, b):
        trained(a, b)
        hub.loop.call_soon_threadsafe(over.wait, 0.6)
        # Its connection ends while the hub cannot see it.
        assert b.client.close()
        go = a.next_go()
        assert [member.inc for member in go.members] == [a.inc]
        assert go.reason == "b (here) is gone: its connection closed"
    assert "the hub itself was frozen for" in caplog.text


def test_a_log_that_others_can_fill_is_one_line_a_second():
    now_s, lines = 0.0, []
    log = logging.Logger("of this test")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    seldom = SeldomLog(log, every_s=1.0, clock=lambda: now_s)
    for hundredth in range(250):
        now_s = hundredth / 100
        seldom.warn(f"trouble {hundredth}\nforged line")
        seldom.flush()
    assert lines == [
        "trouble 0?forged line",
        "trouble 100?forged line (and 99 more like it)",
        "trouble 200?forged line (and 99 more like it)",
    ]
    now_s = 3.5
    seldom.flush()
    seldom.flush()
    assert lines[3:] == ["trouble 249?forged line (and 48 more like it)"]


def test_frames_beyond_the_pace_wait():
    now_s = 0.0
    pace = Pace(10.0, lambda: now_s)
    for later_s in (0.0, 100.0):
        now_s = later_s
        waits = [pace.wait_s() for _ in range(52)]
        assert waits[:50] == [0.0] * 50
        assert waits[50:] == pytest.approx([0.1, 0.2])


def test_a_random_token_is_compared_as_bytes(tmp_path):
    with service(tmp_path) as hub:
        for token in ("ü" * 8, "\udcff", secrets.token_hex(5000)):
            request = upgrade("X").replace(b"X", token.encode("utf-8", "surrogateescape"))
            assert answer_to(hub.port, request)[9:12] in (b"400", b"401", b"431")
