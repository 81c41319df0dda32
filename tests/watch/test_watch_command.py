import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import example_log
import pytest
from test_page import TOKEN, eventually, served

from ragtag.cli.watch import Remote, Request, run_watch
from ragtag.core.errors import SettingError

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = [sys.executable, "-m", "ragtag.cli.main", "watch"]
ENVIRON = {**os.environ, "PYTHONPATH": str(SOURCE)}


@pytest.fixture
def run_directory(tmp_path, monkeypatch):
    """The newest run under a working directory."""
    directory = tmp_path / "runs" / "run-1"
    directory.mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("run-1")
    example_log.append(directory / "log.jsonl", example_log.events(100))
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.mark.parametrize("target", [None, "runs/run-1", "runs/run-1/log.jsonl", "runs/latest"])
def test_one_look_finds_the_log(run_directory, capsys, target):
    assert run_watch(Request(target=target, once=True)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("blue-otter  training  step 100 of 200")
    assert "\x1b" not in shown


def test_a_terminal_without_letters_is_no_reason_to_fail(run_directory):
    environ = {**ENVIRON, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([*COMMAND, "-1"], env=environ, capture_output=True, check=True).stdout.decode("ascii")
    assert "####" in shown.partition("desk/0")[2].partition("desk/1")[0]


def test_where_there_is_no_terminal_it_is_one_look(run_directory, capsys):
    assert run_watch(Request()) == 0
    assert capsys.readouterr().out.count("blue-otter") == 1


def test_json_has_everything(run_directory, capsys):
    run_watch(Request(as_json=True))
    drawn = json.loads(capsys.readouterr().out)
    assert drawn["now"]["step"] == 100
    assert len(drawn["devices"]) == 5
    assert drawn["log"]["path"].endswith("runs/run-1/log.jsonl"), "not latest, which may be another run a moment later"


def test_a_log_that_is_not_there_yet_is_waited_for(run_directory, capsys):
    later = run_directory.parent / "later" / "log.jsonl"

    def write():
        later.parent.mkdir()
        example_log.append(later, example_log.events(3, ended=True))

    timer = threading.Timer(0.3, write)
    timer.start()
    run_watch(Request(target=str(later.parent)), wait_s=20)
    timer.join()
    out, said = capsys.readouterr()
    assert said == f"ragtag watch: there is no log at {later} yet; waiting for it, 20 s at most\n"
    assert out.startswith("blue-otter  ended")


@pytest.mark.parametrize("once", [True, False])
def test_a_log_that_does_not_come_is_an_error(tmp_path, once):
    with pytest.raises(SettingError, match=r"no event log at .*/log\.jsonl.*name a log or a run's directory"):
        run_watch(Request(target=str(tmp_path), once=once), wait_s=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"port": 80}, "--port and --bind belong to the page"),
        ({"bind": "0.0.0.0"}, "--port and --bind belong to the page"),
        ({"web": True, "once": True}, "Leave one of them out"),
        ({"web": True, "target": "http://h:1/?token=x"}, "read a log on this machine"),
        ({"prometheus": 1, "target": "http://h:1/?token=x"}, "read a log on this machine"),
        ({"target": "ftp://h:1/?token=x"}, "not a page's address"),
        ({"target": "http://h:1/"}, "Expected http://HOST:PORT/"),
    ],
)
def test_words_that_do_not_go_together(words, message, monkeypatch):
    monkeypatch.delenv("RAGTAG_TOKEN", raising=False)
    with pytest.raises(SettingError, match=re.escape(message)):
        run_watch(Request(**words))


def test_the_address_of_a_page_does_as_well(run_directory, capsys):
    with served(run_directory / "log.jsonl") as page:
        address = f"http://127.0.0.1:{page.port}/?token={TOKEN}"
        assert run_watch(Request(target=address, once=True)) == 0
        assert capsys.readouterr().out.startswith("blue-otter  training  step 100 of 200")
        with pytest.raises(SettingError, match=r"http://127\.0\.0\.1:\d+ refuses: This page needs its token"):
            run_watch(Request(target=address + "x", once=True))
        remote = Remote(address)
        before = remote.drawn()
    assert remote.drawn() is before, "while nobody answers, what was known is shown"
    with pytest.raises(SettingError, match=r"does not answer: .*refused"):
        run_watch(Request(target=address, once=True))


def test_other_tools_are_fed_with_it(run_directory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    watching = subprocess.Popen(
        [*COMMAND, "--prometheus", str(port)], env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:

        def fed():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    return b"desk/1" in answer.read()
            except OSError:
                return False

        eventually(fed)
        example_log.append(run_directory / "log.jsonl", example_log.events(100, ended=True)[-1:])
        assert watching.wait(20) == 0, "the run has ended"
    finally:
        watching.kill()
        watching.communicate()


class Terminal:
    """`ragtag watch` in a terminal of its own."""

    def __init__(self, *words, columns=80, lines=30):
        self._own, other = pty.openpty()
        self.resize(columns, lines)
        environ = {name: value for name, value in ENVIRON.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            env={**environ, "TERM": "xterm-256color"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its controlling terminal: Ctrl-C works
        )
        os.close(other)
        self.seen = ""

    def resize(self, columns, lines):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def shows(self, words):
        end_s = time.monotonic() + 30
        while words not in self.seen:
            assert time.monotonic() < end_s, self.seen[-3000:]
            if select.select([self._own], [], [], 0.2)[0]:
                try:
                    self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._own, 1 << 16).decode())
                except OSError:
                    assert words in self.seen, self.seen[-3000:]
        self.seen = self.seen.partition(words)[2]

    def press(self, key):
        os.write(self._own, key)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._own)


def test_in_a_terminal_it_goes_on_until_ctrl_c(run_directory):
    terminal = Terminal()
    try:
        terminal.shows("step 100 of 200")
        example_log.append(run_directory / "log.jsonl", example_log.events(101)[-1:])
        terminal.shows("step 101 of 200")
        terminal.resize(120, 40)
        terminal.shows("61°C 1695 MHz")  # there is room for the clock now
        terminal.press(b"\x03")
        terminal.shows("step 101 of 200")
        assert terminal.process.wait(20) == 0
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


def test_in_a_terminal_it_ends_with_the_run(run_directory):
    terminal = Terminal()
    try:
        terminal.shows("step 100 of 200")
        example_log.append(run_directory / "log.jsonl", example_log.events(100, ended=True)[-1:])
        assert terminal.process.wait(20) == 0
        terminal.shows("ended  step 100 of 200")
    finally:
        terminal.close()


def test_web_serves_the_page_until_ctrl_c(run_directory):
    watching = subprocess.Popen(
        [*COMMAND, "--web"], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
        assert lines[0].endswith("runs/run-1/log.jsonl is shown at\n")
        assert lines[2] == "Ctrl-C ends the page, not the run.\n"
        address = lines[1].strip()
        assert Remote(address).drawn()["now"]["step"] == 100
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
        with pytest.raises(SettingError, match="does not answer"):
            Remote(address).drawn()
    finally:
        watching.kill()
        out, errors = watching.communicate()
    assert (out, errors) == ("", "")


def test_a_mistake_is_one_line():
    done = subprocess.run([*COMMAND, "--port", "1"], env=ENVIRON, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ragtag: error: --port and --bind belong to the page")
    assert done.stderr.count("\n") == 1
