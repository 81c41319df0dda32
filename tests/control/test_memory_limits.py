"""What running out of memory teaches: the same on all ranks, never less than before, and kept by every later plan."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.simulated import Devices, equal_plan, plan_of
from tests.control.test_ballot import HASH, ballot

from ragtag.control.ballot import pack, tally, unpack
from ragtag.control.controller import Controller
from ragtag.control.memory import decide, learn, smaller, why, within
from ragtag.control.observation import observe_ballots
from ragtag.control.proposal import Limits
from ragtag.control.sharing import units_per_rank


@given(st.booleans(), st.none() | st.integers(0, 2**40))
def test_they_travel_with_the_ballot(spoilt, fits):
    one = ballot(spoilt=spoilt, fits=fits, absent=True, launched_too_early=True)
    back = unpack(pack(one), num_metrics=1)
    assert (back.spoilt, back.fits, back.absent, back.launched_too_early) == (spoilt, fits, True, True)


def test_what_the_votes_say_about_it():
    outcome = tally([ballot(), ballot(contents_hash=0, fits=12, spoilt=True)], expected_hash=HASH)
    assert outcome.spoilt
    assert not outcome.incomplete
    assert not outcome.unable
    outcome = tally([ballot(contents_hash=HASH - 9), ballot(contents_hash=0, fits=0)], expected_hash=HASH)
    assert outcome.incomplete, "others compute it"
    assert outcome.unable == {1}
    assert not outcome.absent


@given(st.integers(1, 1000), st.integers(1, 32), st.booleans())
def test_smaller_is_half_in_whole_units(samples, unit, by_unit):
    least = smaller(samples, unit=unit, by_unit=by_unit)
    assert least % unit == 0
    assert least <= samples // 2
    assert not (by_unit and least)
    assert by_unit or least > samples / 2 - unit


memories = st.lists(st.none() | st.integers(0, 40), min_size=1, max_size=5)


@given(st.data(), memories)
def test_limits_only_fall_unless_nobody_could_do_anything(data, known):
    ballots = [
        ballot(fits=data.draw(st.none() | st.integers(0, 40)), samples=data.draw(st.integers(0, 9))) for _ in known
    ]
    ballots[0] = msgspec.structs.replace(ballots[0], samples=max(1, ballots[0].samples))
    after = learn(tuple(known), ballots, plan_of([9] * len(known)))
    assert any(most != 0 for most in after)
    for old, new, each in zip(known, after, ballots):
        if each.fits is None and old != 0:
            assert new == old
        fell = new is not None and (old is None or new <= old)
        assert fell or new == old or (old == 0 and new == 1 and each.samples)


def test_reasons():
    plan = plan_of((8, 8, 8))
    assert why((), (None, 4, None), plan) == (
        "rank 1 ran out of memory: at most 4 samples in one forward from now on, 8 before"
    )
    assert why((None, 4, 0), (None, 4, 0), plan) == ""
    decision = decide(7, plan, (None, 0, 3), "because", micro_batch=None)
    assert decision.reason == "because; shares 8, 8, 8 -> 12, 0, 12"
    assert (decision.plan.shares, decision.plan.micro_batch) == ((12, 0, 12), (12, 1, 3))
    assert decision.plan.epoch == plan.epoch + 1
    assert decision.outcome() == "nothing predicted"


def test_pinned_shares_stay_where_they_can():
    plan = within(plan_of((7, 2, 3), micro_batch=5), (None, 1, None), micro_batch=5)
    assert (plan.shares, plan.micro_batch) == ((7, 2, 3), (5, 1, 5))
    plan = within(plan_of((24, 0, 0)), (0, None, 2), micro_batch=None)
    assert (plan.shares, plan.micro_batch) == ((0, 12, 12), (1, 12, 2))


def test_a_step_with_work_done_twice_says_nothing_about_speed():
    seen = observe_ballots([ballot(compute_s=1.0), ballot(compute_s=3.0, fits=4)], plan_of((3, 3)))
    assert seen.compute_s == (1.0, 0.0)
    assert seen.wall_s >= 3.0


@st.composite
def histories(draw):
    ranks = draw(st.integers(2, 5))
    speeds = draw(st.lists(st.sampled_from([1, 2, 5, 10]), min_size=ranks, max_size=ranks))
    unit = draw(st.sampled_from([1, 4]))
    batch = unit * draw(st.integers(2 * ranks, 12 * ranks))
    micro_batch = draw(st.none() | st.integers(unit, 8 * unit))
    events = {}
    for step in draw(st.lists(st.integers(1, 50), max_size=3, unique=True)):
        events[step] = draw(st.integers(0, ranks - 1)), 0 if unit > 1 else draw(st.integers(0, 8))
    return Devices(speeds=speeds), batch, unit, micro_batch, events


@settings(max_examples=60)
@given(histories())
def test_every_later_plan_keeps_to_it(history):
    devices, batch, unit, micro_batch, events = history
    ranks = len(devices.speeds)
    plan = equal_plan(ranks, batch, unit=unit, micro_batch=micro_batch)
    controller, memory = Controller(plan, Limits(micro_batch=micro_batch)), (None,) * ranks
    for step in range(1, 61):
        controller.observe(devices.step(step, controller.plan))
        if step in events:
            failed, fits = events[step]
            ballots = [ballot(fits=fits if rank == failed else None) for rank in range(ranks)]
            before, memory = memory, learn(memory, ballots, plan)
            if reason := why(before, memory, controller.plan):
                decision = controller.keep_to_memory(step, memory, reason)
                assert decision.kind == "memory"
                assert decision.plan == controller.plan
                assert controller.history[-1] == decision
        plan = controller.plan
        assert sum(plan.shares) == batch
        assert sum(units_per_rank(plan, batch)) == -(-batch // unit)
        for share, size, most in zip(plan.shares, plan.micro_batch, memory):
            assert most != 0 or share == 0
            assert not most or unit > 1 or size <= most
            assert micro_batch is None or unit > 1 or size <= micro_batch
