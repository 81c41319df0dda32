import io

import example_log
import pytest
from rich.console import Console
from test_run_state import state_of

from ragtag.watch.drawable import drawable
from ragtag.watch.events import Ended, Member, Members, Said, Step
from ragtag.watch.terminal import Frame, status
from ragtag.watch.words import digits, duration, percent, sparkline


def drawn(steps=100, **options):
    return drawable(state_of(example_log.events(steps, **options)))


def printed(shown, *, width=80, colour=False, encoding="utf-8", **options):
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(
        file=buffer, width=width, force_terminal=colour, color_system="standard" if colour else None, _environ={}
    )
    console.print(Frame(shown, **options))
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("steps", [0, 1, 40, 100])
def test_a_frame_fits_its_terminal(width, steps):
    text = printed(drawn(steps), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "blue-otter" in text


def test_a_frame_says_what_the_state_says():
    text = printed(drawn(40))
    lines = text.splitlines()
    assert lines[0].split("  ") == ["blue-otter", "training", "step 40 of 200", "62.1 s left"]
    assert "eta   63 %  mean 61 %" in text
    rows = {line.split()[0]: line for line in lines if line.startswith(("desk/", "nook/"))}
    assert list(rows) == ["desk/0", "desk/1", "nook/0", "nook/1"]
    for words in (" desk ", " 28 ", "████░░", " 41%", " 64.4 ", "18.3 GB", "61°C", "adds 74 %"):
        assert words in rows["desk/0"], words
    assert rows["nook/1"].rstrip().endswith("costs 4 %")
    joined = " ".join(text.split())
    assert "! rank 1 (desk/1 on desk) holds the others up by 82 ms a step: its loader takes 89 ms" in joined
    assert "shares now follow speed predicted 205 ms a step, achieved 214 ms" in joined
    assert "gone" in printed(drawn(100))


def test_without_colours_it_is_plain_and_without_letters_ascii():
    assert "\x1b" in printed(drawn(), colour=True)
    assert "\x1b" not in printed(drawn())
    text = printed(drawn(40), encoding="ascii")
    assert "####" in text.split("desk/0")[1].splitlines()[0]
    assert "# busy  . waiting  = communicating  ~ data  x stalled" in text


def test_a_small_terminal_shows_the_first_of_many_devices():
    ranks = tuple(Member(name=f"d{rank}", host="h") for rank in range(40))
    many = drawable(state_of([Members(step=0, ranks=ranks), Step(number=1, loss=1.0, shares=(1,) * 40, wall_s=1.0)]))
    lines = printed(many, height=24).splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("and 2") and line.endswith("more") for line in lines)
    assert len(printed(many).splitlines()) > 40
    for height in (24, 18, 15):
        assert len(printed(drawn(40), height=height).splitlines()) <= height


def test_words_from_other_machines_command_no_terminal():
    evil = "\x1b]0;taken\x07\x9b31m\r\n"
    member = Member(name=evil, host=evil)
    state = state_of([Members(step=0, ranks=(member,)), Said(text=evil, source=evil), Ended(step=0, reason=evil)])
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(printed(drawable(state)))


@pytest.mark.parametrize(
    ("options", "quiet_s", "said"),
    [
        ({"steps": 0}, 1.0, "waiting for the first step"),
        ({"steps": 10}, 1.0, "training"),
        ({"steps": 10}, 300.0, "nothing new for 5 min"),
        ({"steps": 10, "ended": True}, 300.0, "ended"),
    ],
)
def test_how_a_run_is(options, quiet_s, said):
    assert status(drawn(**options), quiet_s)[0] == said


def test_why_a_run_ended_is_said():
    shown = drawable(state_of([*example_log.events(3), Ended(step=3, reason="Ctrl-C")]))
    assert status(shown, None) == ("ended: Ctrl-C", "red")


def test_numbers_as_people_write_them():
    seconds = (None, 0.0, 0.0123, 0.207, 0.9996, 9.96, 62.14, 89.9, 91, 3599, 3600 * 5, 86400 * 3)
    expected = "– / 0 ms / 12 ms / 207 ms / 1 s / 10 s / 62.1 s / 89.9 s / 2 min / 1 h 0 min / 5 h 0 min / 3 d 0 h"
    assert " / ".join(map(duration, seconds)) == expected
    assert [digits(value) for value in (None, 0, 1.2345, 12.3, 999.6, 12345)] == [
        "–",
        "0",
        "1.23",
        "12.3",
        "1000",
        "12,345",
    ]
    assert [percent(part) for part in (None, 0, 0.0781, 0.87, 1)] == ["–", "0 %", "7.8 %", "87 %", "100 %"]


def test_a_sparkline_has_the_shape_of_its_values():
    assert sparkline([], 10) == ""
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(80)), 8) == "▁▂▃▄▅▆▇█"
