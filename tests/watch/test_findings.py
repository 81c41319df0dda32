"""How the views tell of who held the others up."""

import json

import example_log
import msgspec
import pytest
from test_run_state import state_of, step
from test_terminal import printed

from ragtag.cli.report import run_report
from ragtag.watch.drawable import drawable
from ragtag.watch.events import Began, Finding, Member, Members
from ragtag.watch.log_file import LogFile

TWO = (Member(name="a/0", host="a"), Member(name="b/0", host="b"))
HOLDS = Finding(
    step=3,
    rank=1,
    name="b/0",
    host="b",
    cause="compute",
    since_step=2,
    lost_s=0.03,
    text="rank 1 (b/0 on b) holds the others up by 30 ms a step: its device takes 70 ms",
)
MORE = msgspec.structs.replace(HOLDS, step=9, lost_s=0.08, text=HOLDS.text.replace("30", "80"))
OVER = msgspec.structs.replace(HOLDS, step=12, over=True, text=HOLDS.text.replace("holds", "held"))
BEGINS = [Began(step=0), Members(step=0, ranks=TWO), step(1), step(2), step(3), HOLDS]


def findings(events):
    drawn = drawable(state_of(events))
    return drawn["findings"], [device["finding"] for device in drawn["devices"]]


def test_one_that_goes_on():
    [shown], by_device = findings(BEGINS)
    assert (shown["over"], shown["text"], shown["lost_s"]) == (False, HOLDS.text, 0.03)
    assert by_device == [None, HOLDS.text]


def test_one_that_costs_more_now_is_still_one():
    [shown], by_device = findings([*BEGINS, MORE])
    assert (shown["lost_s"], shown["text"]) == (0.08, MORE.text)
    assert by_device == [None, MORE.text]


def test_one_that_is_over():
    [shown], by_device = findings([*BEGINS, MORE, OVER])
    assert (shown["over"], shown["step"], shown["text"]) == (True, 12, OVER.text)
    assert by_device == [None, None]


def test_those_that_go_on_come_first():
    other = msgspec.structs.replace(HOLDS, rank=0, name="a/0", cause="data")
    shown, _ = findings([*BEGINS, other, OVER])
    assert [(each["name"], each["over"]) for each in shown] == [("a/0", False), ("b/0", True)]


@pytest.mark.parametrize(
    "event",
    [Members(step=5, generation=1, ranks=TWO), Members(step=5, generation=1, ranks=TWO[:1]), Began(step=5)],
)
def test_a_new_generation_and_a_new_start_end_them(event):
    [shown], by_device = findings([*BEGINS, event])
    assert (shown["over"], shown["step"]) == (True, 5)
    assert set(by_device) == {None}


def test_a_new_file_of_the_same_log_does_not():
    members = BEGINS[1]
    for again in (Began(step=0, continued=True), members, msgspec.structs.replace(members, t=7.0)):
        [shown], _ = findings([*BEGINS, again])
        assert not shown["over"]


def test_the_terminal_warns_of_one_that_goes_on_and_says_that_one_is_over():
    def words(*events):
        return " ".join(printed(drawable(state_of([*BEGINS, *events]))).split())

    assert f"! {HOLDS.text}" in words()
    assert f"step 12: over: {OVER.text}" in words(OVER)
    assert "!" not in words(OVER)


def test_the_report_shows_both_and_tells_them_apart(tmp_path, capsys):
    other = msgspec.structs.replace(HOLDS, rank=0, name="a/0", cause="data", text="<b>its loader</b>")
    with_both = [*BEGINS, OVER, other]
    log = LogFile(tmp_path / "log.jsonl")
    log.append([msgspec.json.encode(event) for event in with_both])
    log.close()
    run_report(tmp_path, output=None, trace=None, as_json=True)
    shown = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["cause"], each["over"]) for each in shown] == [("data", False), ("compute", True)]
    run_report(tmp_path, output=None, trace=None, as_json=False)
    page = (tmp_path / "report.html").read_text()
    assert '<p class="finding"><b>data</b>, since step 2: &lt;b&gt;its loader&lt;/b&gt;</p>' in page
    assert f'<p class="finding over"><b>compute</b>, since step 2, over since step 12: {OVER.text}</p>' in page


def test_a_report_of_a_run_in_which_nobody_did(tmp_path):
    example_log.append(tmp_path / "log.jsonl", BEGINS[:-1])
    run_report(tmp_path, output=None, trace=None, as_json=False)
    assert "<h2>Who held the others up</h2>\n<p>Nobody.</p>" in (tmp_path / "report.html").read_text()
