import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.sim.pulled import drain, play_claims


def greedy_end(ends_s, unit_s, pool):
    ends = list(ends_s)
    for _ in range(pool):
        rank = min(range(len(ends)), key=lambda r: ends[r] + unit_s[r])
        ends[rank] += unit_s[rank]
    return max(ends)


ranks = st.lists(st.tuples(st.floats(0, 3), st.floats(0.05, 1)), min_size=1, max_size=6)


@given(ranks, st.integers(0, 40))
def test_draining_ends_as_early_as_giving_each_unit_to_whoever_ends_it_first(given_ranks, pool):
    ends, unit = (np.array([values]) for values in zip(*given_ranks))
    counts, done = drain(ends, unit, pool)
    assert counts.sum() == pool
    assert (counts >= 0).all()
    assert done.max() == pytest.approx(greedy_end(ends[0], unit[0], pool), abs=1e-6)


def test_units_that_end_together_are_not_taken_twice():
    counts, done = drain(np.zeros((2, 3)), np.ones((2, 3)), 4)
    assert counts.sum(axis=1).tolist() == [4, 4]
    assert done.max() == pytest.approx(2)


def test_a_rank_without_work_takes_nothing():
    counts, _ = drain(np.array([[0.0, np.inf]]), np.ones((1, 2)), 5)
    assert counts.tolist() == [[5, 0]]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0.2, 1), st.floats(0.8, 1.25)), min_size=2, max_size=8),
    st.integers(0, 60),
)
def test_claims_compute_every_unit_once_and_never_end_before_the_ideal(given_ranks, pool):
    planned, usual, luck = (list(values) for values in zip(*given_ranks))
    unit = [seconds * factor for seconds, factor in zip(usual, luck)]
    done, ends = play_claims(planned, pool, [0.0] * len(planned), unit, usual)
    assert sum(done) == sum(planned) + pool
    assert all(has >= had for has, had in zip(done, planned))
    for count, end, seconds in zip(done, ends, unit):
        assert end == pytest.approx(count * seconds)
    ideal = greedy_end([count * seconds for count, seconds in zip(planned, unit)], unit, pool)
    assert max(ends) >= ideal - 1e-9


def test_claims_come_near_to_the_ideal():
    """What large clusters are simulated with, against what small ones are."""
    draws = np.random.default_rng(0)
    usual = np.array([0.04, 0.04, 0.08, 0.16, 0.05, 0.06, 0.1, 0.04])
    shares = np.round(2 / usual).astype(int)
    pulled = np.maximum(1, (0.3 * shares).astype(int))
    played, ideal = [], []
    for _ in range(40):
        unit = usual * np.exp(0.1 * draws.standard_normal(len(usual)))
        planned = shares - pulled
        done, ends = play_claims(planned.tolist(), int(pulled.sum()), [0.0] * 8, unit.tolist(), usual.tolist())
        assert sum(done) == shares.sum()
        played.append(max(ends))
        ideal.append(drain((planned * unit)[None], unit[None], int(pulled.sum()))[1].max())
    assert 1 <= np.mean(played) / np.mean(ideal) < 1.06
