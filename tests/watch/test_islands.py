"""What a log says of islands is added up, and the report shows it."""

import pytest

from ragtag.cli.report_html import page
from ragtag.watch.drawable import drawable
from ragtag.watch.events import Contributed, Exchanged, Guarded, IslandChanged, Retuned
from ragtag.watch.state import RunState


@pytest.fixture
def state():
    made = RunState()
    home = Contributed(island="home", weight=0.75, tokens=300.0, sent_bytes=132, plain_bytes=1000)
    cloud = Contributed(island="cloud", weight=0.25, tokens=100.0, age=1, sent_bytes=132, plain_bytes=1000)
    for event in (
        IslandChanged(island="home", change="attached", text="from 10.0.0.1:5, at step 0: warms up alone"),
        IslandChanged(island="cloud", change="attached", text="from 10.0.0.2:5, at step 0: trains with the others"),
        Exchanged(fragment=0, version=2, islands=(home, cloud), inner_steps=10, reason="all have contributed"),
        Exchanged(fragment=1, version=2, islands=(home,), inner_steps=10, reason="a quorum has waited 2 s for cloud"),
        Retuned(inner_steps=14, codec="int4", reason="cloud exchanges in 4.8 s"),
        Guarded(island="cloud", before=2.0, after=2.5, noise=0.1, action="H is halved to 10"),
        IslandChanged(island="cloud", change="refused", text="its norm is <absurd>"),
        IslandChanged(island="cloud", change="lost", text="its connection closed"),
    ):
        made.apply(event)
    return made


def test_islands_are_added_up(state):
    home, cloud = state.islands.islands["home"], state.islands.islands["cloud"]
    assert (home.fragments, home.staleness, home.weight) == (2, 0.0, 0.75)
    assert (cloud.fragments, cloud.staleness, cloud.late, cloud.weight, cloud.refused) == (1, 1.0, 1, 0.25, 1)
    assert home.compression == pytest.approx(1000 / 132)
    assert (cloud.state, cloud.text) == ("lost", "its connection closed")
    shown = drawable(state)["islands"]
    assert shown["num_merges"] == 2
    assert shown["rounds"] == 1.0
    assert shown["tempo"]["inner_steps"] == 14


def test_the_report_has_them(state):
    text = page(drawable(state), "log.jsonl")
    for words in ("Islands", "every 14 steps", "cloud exchanges in 4.8 s", "H is halved to 10", "7.6 times"):
        assert words in text
    assert "&lt;absurd&gt;" in text


def test_without_islands_nothing_is_said():
    assert drawable(RunState())["islands"] is None
    assert "Islands" not in page(drawable(RunState()), "log.jsonl")
