import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.sharing import choose_unit, initial_plan, units_per_rank
from ragtag.core.errors import SettingError


@st.composite
def plans(draw):
    world_size = draw(st.integers(1, 6))
    shares = draw(st.none() | st.lists(st.integers(0, 40), min_size=world_size, max_size=world_size).filter(any))
    batch = sum(shares) if shares else draw(st.integers(1, 100))
    unit = draw(st.integers(1, batch))
    return initial_plan(world_size=world_size, global_batch_size=batch, unit=unit, shares=shares)


@given(plans(), st.data())
def test_units_cover_any_batch(plan, data):
    batch = sum(plan.shares)
    samples = data.draw(st.integers(1, 3 * batch))
    assert sum(units_per_rank(plan, samples)) == -(-samples // plan.unit)


@given(plans())
def test_a_full_batch_has_exactly_the_plans_shares(plan):
    start = 0
    for share, count in zip(plan.shares, units_per_rank(plan, sum(plan.shares))):
        stop = min(start + count * plan.unit, sum(plan.shares))
        assert stop - start == share
        start = stop
    assert all(size >= 1 for size in plan.micro_batch)
    assert len(plan.micro_batch) == len(plan.chunk_weights) == len(plan.shares)


def test_pinned_shares_are_kept():
    plan = initial_plan(world_size=3, global_batch_size=16, unit=1, shares=(8, 5, 3))
    assert plan.shares == plan.micro_batch == (8, 5, 3)
    assert plan.reason == "pinned: 8, 5, 3"
    assert units_per_rank(plan, 16) == (8, 5, 3)
    assert units_per_rank(plan, 4) == (2, 1, 1)


def test_pinned_shares_in_units():
    plan = initial_plan(world_size=3, global_batch_size=18, unit=4, shares=(9, 6, 3))
    assert units_per_rank(plan, 18) == (3, 2, 0)
    assert plan.shares == (12, 6, 0)
    assert plan.micro_batch == (4, 4, 4)
    assert plan.reason == "pinned: 9, 6, 3 (in whole units of 4: 12, 6, 0)"


def test_an_idle_rank_is_fine():
    plan = initial_plan(world_size=3, global_batch_size=10, unit=1, shares=(10, 0, 0))
    assert plan.micro_batch == (10, 1, 1)
    assert units_per_rank(plan, 3) == (3, 0, 0)


def test_equal_shares():
    plan = initial_plan(world_size=3, global_batch_size=16, unit=1, micro_batch=4, separable_reason="unit 1: separable")
    assert plan.shares == (6, 5, 5)
    assert plan.micro_batch == (4, 4, 4)
    assert plan.reason == "equal: nothing measured yet; unit 1: separable"
    assert initial_plan(world_size=1, global_batch_size=16, unit=1).reason == "alone: one rank has the whole batch"


def test_more_ranks_than_units_is_said():
    plan = initial_plan(world_size=3, global_batch_size=16, unit=8)
    assert plan.shares == (8, 8, 0)
    assert plan.reason == "equal: nothing measured yet (1 of 3 ranks idle: the batch has only 2 units)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shares": (8, 8)}, r"shares = \(8, 8\) has 2 numbers, but there are 3 ranks.*global_batch_size = 16"),
        ({"shares": (8, 5, 4)}, r"shares = \(8, 5, 4\) sums to 17, but global_batch_size = 16"),
        ({"shares": (8, 9, -1)}, r"shares = \(8, 9, -1\) is not valid"),
        ({"shares": (8.0, 4, 4)}, r"shares = \(8.0, 4, 4\) is not valid"),
        ({"global_batch_size": 0}, "global_batch_size = 0 is not valid"),
        ({"unit": 0}, "unit = 0 is not valid with global_batch_size = 16"),
        ({"unit": 17}, "unit = 17 is not valid with global_batch_size = 16. Expected 1 to 16"),
        ({"micro_batch": 0}, "micro_batch = 0 is not valid"),
        ({"unit": 4, "micro_batch": 2}, "micro_batch = 2 is smaller than unit = 4"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        initial_plan(**{"world_size": 3, "global_batch_size": 16, "unit": 1, **settings})


@given(st.integers(1, 5000), st.booleans(), st.booleans())
def test_unit_is_in_range(batch, separable, batch_norm):
    unit, reason = choose_unit(global_batch_size=batch, separable=separable, batch_norm=batch_norm)
    assert 1 <= unit <= min(batch, 32)
    assert f"unit {unit}:" in reason
    if separable:
        assert unit == 1
    elif batch_norm:
        assert unit >= min(8, batch)


@pytest.mark.parametrize(
    ("batch", "batch_norm", "unit"),
    [(8, False, 1), (64, False, 4), (256, False, 16), (4096, False, 32), (4, True, 4), (64, True, 8), (256, True, 16)],
)
def test_units_chosen(batch, batch_norm, unit):
    assert choose_unit(global_batch_size=batch, separable=False, batch_norm=batch_norm)[0] == unit
