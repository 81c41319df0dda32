import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.sim.membership import Change, failures, starts_absent


@given(st.integers(1, 20), st.floats(0.01, 20), st.floats(0, 2000), st.integers(0, 5))
def test_whoever_fails_was_there_and_comes_back_after_its_repair(num_devices, rate, repair_s, seed):
    changes = failures(num_devices, duration_s=5000, failures_per_hour=rate, repair_s=repair_s, seed=seed)
    assert changes == sorted(changes)
    assert not any(starts_absent(num_devices, changes))
    for rank in range(num_devices):
        own = [change for change in changes if change.rank == rank]
        assert [change.joins for change in own] == [bool(index % 2) for index in range(len(own))]
        for left, joined in zip(own[::2], own[1::2]):
            assert joined.at_s == pytest.approx(left.at_s + repair_s)


def test_failures_come_as_often_as_asked():
    changes = failures(1000, duration_s=3600, failures_per_hour=0.5, repair_s=1e9, seed=0)
    assert len(changes) == pytest.approx(1000 * (1 - 0.6065), rel=0.1)
    assert failures(1000, duration_s=3600, failures_per_hour=0, repair_s=1, seed=0) == []


def test_who_joins_first_was_not_there():
    changes = [Change(at_s=5, rank=1, joins=True), Change(at_s=9, rank=0, joins=False)]
    assert starts_absent(3, changes) == [False, True, False]
