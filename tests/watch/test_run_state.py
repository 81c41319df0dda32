import math
import sys
from itertools import pairwise

import example_log
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.watch.curve import Curve
from ragtag.watch.drawable import drawable
from ragtag.watch.events import Began, Decided, Ended, Finding, Left, Looped, Member, Members, Step, Vitals
from ragtag.watch.state import KEPT_STEPS, RunState
from ragtag.watch.timeline import timeline

TWO = (Member(name="a/0", host="a"), Member(name="b/0", host="b"))


def state_of(events):
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def step(number, *, loss=1.0, eta=0.5, shares=(3, 5), **fields):
    ranks = len(shares)
    return Step(
        number=number,
        loss=loss,
        eta=eta,
        samples=sum(shares),
        wall_s=0.5,
        shares=shares,
        compute_s=tuple(0.1 * (rank + 1) for rank in range(ranks)),
        data_s=(0.02,) * ranks,
        wait_s=tuple(0.3 - 0.1 * (rank + 1) for rank in range(ranks)),
        apply_s=(0.03,) * ranks,
        comm_s=0.15,
        **fields,
    )


@given(
    st.lists(st.floats(-1e3, 1e3) | st.none(), max_size=300),
    st.integers(1, 10).map(lambda half: 2 * half),
    st.integers(0, 50),
)
def test_a_curve_has_an_end_and_loses_nothing(values, most, newest):
    curve = Curve(most)
    points = list(enumerate(values, 1))
    first = max(0, len(points) - newest)
    curve.extend(points[:first])
    steps, means = curve.drawn(points[first:])
    known = [(number, value) for number, value in points if value is not None]
    assert len(steps) == len(means) <= most + 1
    assert steps == sorted(set(steps))
    assert steps[-1:] == [number for number, _ in known[-1:]]
    counts = [sum(before < number <= after for number, _ in known) for before, after in zip([0, *steps], steps)]
    whole = math.fsum(count * mean for count, mean in zip(counts, means))
    assert whole == pytest.approx(math.fsum(value for _, value in known), abs=1e-6)


@pytest.mark.parametrize("steps", [3, 63, 100, 130, 400])
def test_totals_are_those_of_every_step_by_name(steps):
    events = example_log.events(steps)
    names, expected = (), {}
    for event in events:
        if isinstance(event, Members):
            names = [member.name for member in event.ranks]
        if isinstance(event, Step):
            for rank, name in enumerate(names):
                sums = expected.setdefault(name, [0, 0, 0.0, 0.0, 0.0, 0.0, 0.0])
                row = (1, event.shares[rank], *(column[rank] for column in (event.compute_s, event.data_s)))
                row += (event.wait_s[rank], event.apply_s[rank], event.comm_s)
                for place, value in enumerate(row):
                    sums[place] += value
    found = {
        name: [t.steps, t.samples, t.compute_s, t.data_s, t.wait_s, t.apply_s, t.comm_s]
        for name, t in state_of(events).totals().items()
    }
    assert found.keys() == expected.keys()
    for name, sums in expected.items():
        assert found[name] == pytest.approx(sums, rel=1e-9), name


def test_the_time_that_a_stalled_rank_cannot_account_for_is_its_stall():
    totals = state_of(example_log.events(example_log.STALLS)).totals()["nook/0"]
    stalled = next(event for event in example_log.events(60) if isinstance(event, Step) and event.stalled)
    assert totals.stalled_s == pytest.approx(stalled.wall_s - stalled.comm_s - stalled.apply_s[2], abs=1e-6)


def test_memory_has_an_end():
    state = RunState()
    state.apply(Members(step=0, ranks=TWO))
    base, sizes = step(1), []
    for number in range(1, 20_001):
        state.apply(msgspec.structs.replace(base, number=number))
        state.apply(Decided(step=number, decided="shares", reason="r"))
        state.apply(
            Finding(
                step=number, rank=0, name="a/0", host="a", cause="data", since_step=number, lost_s=1, text="", over=True
            )
        )
        if number in (10_000, 20_000):
            kept = (state.steps(), state.decisions, state.findings, state.loss.steps, state.eta.values)
            sizes.append([len(each) for each in kept] + [sys.getsizeof(each) for each in kept])
    assert max(sizes[1][:5]) <= 2000
    assert sum(sizes[1]) <= 1.3 * sum(sizes[0])
    assert state.num_steps == 20_000
    assert state.mean_eta == pytest.approx(0.5)


def test_devices_that_come_and_go_forever_are_forgotten_in_the_end():
    state = RunState()
    for number in range(500):
        ranks = (*TWO, Member(name=f"guest/{number}", host="guest"))
        state.apply(Members(step=number, generation=number, ranks=ranks))
        state.apply(step(number + 1, shares=(3, 3, 2)))
    assert len(state.devices) <= 210
    assert len(state.devices) + state.forgotten == 502
    assert state.totals()["a/0"].steps == 500
    assert len(drawable(state)["devices"]) < 100


def test_of_a_step_that_comes_twice_the_last_one_counts():
    state = state_of([Members(step=0, ranks=TWO), *(step(number) for number in range(1, 101))])
    state.apply(Members(step=99, generation=1, ranks=TWO))
    state.apply(step(100, loss=7.0, shares=(4, 4), generation=1))
    assert state.num_steps == 100
    assert state.step is not None
    assert state.step.loss == 7.0
    assert state.totals()["a/0"].samples == 99 * 3 + 4
    assert state.curve("loss")[0] == list(range(1, 101))
    state.apply(step(98, loss=9.0, generation=1))
    assert [each.number for each in state.steps()][-3:] == [98, 99, 100]


def test_what_a_lost_rank_says_long_after_is_not_counted_again():
    state = state_of([Members(step=0, ranks=TWO), *(step(number, generation=1) for number in range(1, 301))])
    state.apply(step(2, generation=0))
    assert state.num_steps == 300


def test_a_run_that_goes_on_from_a_checkpoint_takes_back_what_came_after_it():
    first = [Members(step=0, ranks=TWO), *(step(number) for number in range(1, 301)), Ended(step=300, reason="killed")]
    state = state_of([Began(), *first])
    assert drawable(state)["now"]["status"] == "ended"
    state.apply(Began(step=250))
    state.apply(Members(step=250, ranks=TWO))
    state.apply(step(251, loss=5.0))
    assert state.step is not None
    assert (state.step.number, state.step.loss) == (251, 5.0)
    assert state.curve("loss")[0][-2:] == [250, 251]
    assert state.curve("loss")[1][-1] == 5.0
    assert drawable(state)["now"]["status"] == "running"


def test_a_new_part_of_the_log_changes_nothing():
    events = example_log.events(100)
    whole = drawable(state_of(events))
    state = state_of(events)
    began = next(event for event in events if isinstance(event, Began))
    state.apply(msgspec.structs.replace(began, continued=True))
    state.apply([event for event in events if isinstance(event, Members)][-1])
    assert drawable(state)["devices"] == whole["devices"]
    assert state.num_steps == 100


def test_who_has_left_keeps_its_row_and_its_reason():
    drawn = drawable(state_of(example_log.events(100)))
    assert [device["name"] for device in drawn["devices"]] == ["desk/0", "desk/1", "nook/0", "nook/2", "nook/1"]
    gone = drawn["devices"][-1]
    assert gone["left"] == {"step": example_log.LEAVES, "reason": "no sign of life for 10 s"}
    assert gone["totals"]["steps"] == example_log.LEAVES
    assert gone["rank"] is gone["share"] is None
    assert [(each["name"], each["joined"]) for each in drawn["changes"]] == [("nook/2", True), ("nook/1", False)]


def test_who_comes_back_under_its_name_goes_on_with_its_totals():
    alone = Members(step=2, generation=1, ranks=TWO[:1], left=(Left(name="b/0", reason="unplugged"),))
    state = state_of([Members(step=0, ranks=TWO), step(1), step(2), alone, step(3, shares=(8,))])
    state.apply(Members(step=3, generation=2, ranks=TWO))
    state.apply(step(4))
    totals = state.totals()
    assert (totals["a/0"].steps, totals["b/0"].steps) == (4, 3)
    assert [device["left"] for device in drawable(state)["devices"]] == [None, None]


def test_a_decision_and_a_finding_that_are_written_again_are_one():
    drawn = drawable(state_of(example_log.events(100)))
    (decision,) = drawn["decisions"]
    assert (decision["achieved_step_s"], decision["achieved_over"]) == (0.2135, 10)
    (finding,) = drawn["findings"]
    assert finding["over"]
    assert all(device["finding"] is None for device in drawn["devices"])
    during = drawable(state_of(example_log.events(40)))
    assert [device["finding"] is None for device in during["devices"]] == [True, False, True, True]


def test_now_is_what_the_newest_step_says():
    events = example_log.events(100)
    steps = [event for event in events if isinstance(event, Step)]
    now = drawable(state_of(events))["now"]
    assert (now["eta"], now["loss"], now["step"]) == (steps[-1].eta, steps[-1].loss, 100)
    assert now["eta_mean"] == pytest.approx(sum(each.eta for each in steps) / 100, rel=1e-12)
    assert now["step_s"] == pytest.approx(sum(each.wall_s for each in steps[-50:]) / 50)
    assert now["left_s"] == pytest.approx(100 * now["step_s"])


def test_a_state_is_drawn_before_there_is_anything():
    for events in ([], [Began()], [Began(), Members(step=0, ranks=TWO)], [Looped(step=0, last=5)]):
        drawn = drawable(state_of(events))
        assert drawn["now"]["status"] == "waiting"
        assert drawn["timeline"]["spans"] == []
    assert drawable(state_of([step(1)]))["devices"][1]["name"] == "rank 1", "a log whose beginning is lost"


def test_what_a_log_leaves_out_is_not_known():
    bare = Step(number=1, loss=None, shares=(1, 1), wall_s=1.0)
    state = state_of([Members(step=0, ranks=TWO), bare, Vitals(step=1, memory_bytes=(5,))])
    drawn = drawable(state)
    assert (drawn["now"]["loss"], drawn["now"]["eta"], drawn["now"]["eta_mean"]) == (None, None, None)
    assert [device["memory_bytes"] for device in drawn["devices"]] == [5, None]
    for _ in range(2):
        state = state_of([state.members, *(msgspec.structs.replace(bare, number=n) for n in range(1, 200)), step(200)])
    assert state.totals()["a/0"].samples == 199 + 3


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 5), min_size=1, max_size=6), st.booleans())
def test_the_timeline_stays_inside_its_steps(rows, stalls):
    ranks = tuple(Member(name=f"d{rank}") for rank in range(len(rows)))
    longest_s = max(sum(row) for row in rows)
    columns = dict(zip(("compute_s", "data_s", "wait_s", "apply_s"), zip(*[row[:4] for row in rows])))
    fields = {"loss": 1.0, "wall_s": 0.9 * longest_s, "comm_s": rows[0][4], "shares": (1,) * len(rows), **columns}
    steps = [Step(number=number, stalled=(0,) if stalls else (), **fields) for number in (1, 2)]
    state = state_of([Members(step=0, ranks=ranks), *steps])
    drawn = timeline(state.kept())
    ends_s = [0.0, *drawn["ends_s"]]
    for device in range(len(rows)):
        spans = [(start, stop) for which, _, start, stop in drawn["spans"] if which == device]
        for (start, stop), following in zip(spans, [*spans[1:], (math.inf, math.inf)]):
            assert start <= stop <= following[0] + 1e-9
            inside = [before - 1e-5 <= start and stop <= after + 1e-5 for before, after in pairwise(ends_s)]
            assert any(inside)


def test_the_last_steps_are_kept_whole():
    state = state_of([Members(step=0, ranks=TWO), *(step(number) for number in range(1, 1001))])
    kept = [each.number for each in state.steps()]
    assert len(kept) >= KEPT_STEPS
    assert kept == list(range(1001 - len(kept), 1001))
