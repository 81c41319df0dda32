import io
import os
import pty
import re
import select

import msgspec
import pytest

from ragtag.cli.console import Console, StatusLine, clock_time, progress
from ragtag.watch.events import Began, Looped, Member, Members, Step
from ragtag.watch.log_file import LogFile
from ragtag.watch.state import RunState

MEMBERS = Members(step=0, ranks=(Member(name="a"), Member(name="b")))


def step(number: int, **more) -> Step:
    return Step(
        **{"number": number, "loss": 2.3125, "samples": 100, "wall_s": 0.25, "eta": 0.968, "shares": (60, 40)} | more
    )


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def state(*events):
    found = RunState()
    for event in (Began(), MEMBERS, *events):
        found.apply(event)
    return found


def test_a_line_says_how_far_how_well_and_how_long_still():
    told = state(Looped(step=0, last=1000), *(step(number) for number in range(1, 201)))
    assert progress(told) == "step 200 of 1,000  loss 2.312  400 samples/s  eta 97 %  3:20 left"
    assert progress(told, bar=True).startswith("[####....................]  20 %  step 200 of 1,000  loss")


def test_what_is_not_known_is_left_out():
    assert progress(state(step(3, loss=None, eta=0.0, wall_s=0.0))) == "step 3  loss -"
    assert "left" not in progress(state(Looped(step=0, last=5), step(7))), "it is past the call that was told of"


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (59.6, "1:00"), (200, "3:20"), (3725, "1:02:05")])
def test_times(seconds, said):
    assert clock_time(seconds) == said


def test_elsewhere_than_on_a_terminal_one_line_an_interval(tmp_path):
    clock, out = Clock(), io.StringIO()
    console = Console(tmp_path / "log.jsonl", out, clock=clock)
    with LogFile(tmp_path / "log.jsonl") as file:
        file.append([msgspec.json.encode(event) for event in (Began(), MEMBERS, Looped(step=0, last=400))])
        for number in range(1, 201):  # 50 s
            file.append([msgspec.json.encode(step(number))])
            clock.now_s += 0.25
            console.update()
        clock.now_s += 60
        console.update()
    console.close()
    lines = out.getvalue().splitlines()
    assert len(lines) in (4, 5)
    assert all(line.startswith("ragtag: step ") and "\033" not in line for line in lines)
    assert len(set(lines)) == len(lines), "a step is said once"


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path):
    clock, out = Clock(), io.StringIO()
    console = Console(tmp_path / "log.jsonl", out, clock=clock)
    clock.now_s = 100
    console.update()
    assert out.getvalue() == ""


def test_on_a_terminal_the_last_line_is_a_bar_and_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")
    leader, follower = pty.openpty()
    with open(follower, "w") as stream, open(leader, "rb", buffering=0) as screen:
        clock = Clock()
        console = Console(tmp_path / "log.jsonl", stream, clock=clock)
        with LogFile(tmp_path / "log.jsonl") as file:
            file.append([msgspec.json.encode(event) for event in (Began(), MEMBERS, Looped(step=0, last=8), step(2))])
        console.update()
        console.close()
        shown = ""
        while "\033[r" not in shown:  # a terminal hands over what it has, be it all or not
            assert select.select([screen], [], [], 10.0)[0], shown
            shown += os.read(screen.fileno(), 1 << 16).decode()
    assert "\033[1;19r" in shown, "everything else scrolls above the last line"
    bar = re.search(r"\033\[20;1H\033\[K(.*?)\0338", shown)
    assert bar is not None
    assert bar[1].startswith("[######..................]  25 %  step 2 of 8")
    assert len(bar[1]) < 60
    assert shown.index("\033[r") > shown.index("25 %"), "the whole screen scrolls again"


def test_a_terminal_of_two_lines_is_left_alone(monkeypatch):
    monkeypatch.setenv("LINES", "2")
    out = io.StringIO()
    line = StatusLine(out)
    line.show("step 1")
    line.close()
    assert out.getvalue() == ""
