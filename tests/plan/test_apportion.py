from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ragtag.core.errors import SettingError
from ragtag.plan.apportion import apportion, apportion_times


def one_by_one(total, weights, caps):
    """The definition: each piece to the least (n + 1) / weight, ties to the lowest rank."""
    counts = [0] * len(weights)
    for _ in range(total):
        free = [rank for rank, weight in enumerate(weights) if weight and counts[rank] < caps[rank]]
        counts[min(free, key=lambda rank: (Fraction(counts[rank] + 1, weights[rank]), rank))] += 1
    return tuple(counts)


def all_splits(total, caps):
    return (split for split in product(*(range(cap + 1) for cap in caps)) if sum(split) == total)


weights_and_caps = st.lists(st.tuples(st.integers(0, 9) | st.integers(0, 10**15), st.integers(0, 30)), min_size=1)


@given(st.integers(0, 60), weights_and_caps)
def test_the_bulk_start_changes_nothing(total, ranks):
    weights, caps = [weight for weight, _ in ranks], [cap for _, cap in ranks]
    assume(sum(cap for weight, cap in ranks if weight) >= total)
    assert apportion(total, weights, caps) == one_by_one(total, weights, caps)


@given(st.integers(0, 200), st.lists(st.integers(0, 50), min_size=1).filter(any))
def test_without_caps(total, weights):
    counts = apportion(total, weights)
    assert counts == one_by_one(total, weights, [total] * len(weights))
    assert sum(counts) == total
    for count, weight in zip(counts, weights):
        assert count >= total * weight // sum(weights)
        assert weight or not count


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=4))
def test_the_largest_time_is_minimal(total, ranks):
    weights, caps = [weight for weight, _ in ranks], [cap for _, cap in ranks]
    assume(sum(caps) >= total)

    def makespan(split):
        return max(Fraction(count, weight) for count, weight in zip(split, weights))

    assert makespan(apportion(total, weights, caps)) == min(map(makespan, all_splits(total, caps)))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8).filter(any))
def test_pinned_shares_come_back_exactly(shares):
    assert apportion(sum(shares), shares) == tuple(shares)


curves = st.lists(st.integers(0, 20), min_size=9, max_size=9).map(sorted)


@given(st.integers(0, 8), st.lists(st.tuples(curves, st.integers(0, 8)), min_size=1, max_size=4))
def test_any_nondecreasing_times_give_the_minimal_largest_time(total, ranks):
    caps = [cap for _, cap in ranks]
    assume(sum(caps) >= total)

    def makespan(split):
        return max((curve[count] for (curve, _), count in zip(ranks, split) if count), default=0)

    split = apportion_times(total, [curve.__getitem__ for curve, _ in ranks], caps)
    assert sum(split) == total
    assert makespan(split) == min(map(makespan, all_splits(total, caps)))


@given(st.integers(0, 40), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_linear_times_are_weights(total, speeds):
    # Times that are exact integers: n * 27720 / speed, 27720 being divisible by 1..12.
    times = [lambda n, cost=27720 // speed: n * cost for speed in speeds]
    assert apportion_times(total, times) == apportion(total, speeds)


def test_ties_go_to_the_lowest_rank():
    assert apportion(4, (1, 1, 1)) == (2, 1, 1)
    assert apportion_times(4, [lambda n: n] * 3) == (2, 1, 1)


def test_no_cap_is_none():
    assert apportion(10, (1, 1), (None, 2)) == (8, 2)
    assert apportion_times(10, [lambda n: n] * 2, (None, 2)) == (8, 2)


def test_a_step_in_the_curve_is_respected():
    # The second device is fast up to 4 pieces and swaps beyond.
    times = [lambda n: 10 * n, lambda n: n if n <= 4 else 1000]
    assert apportion_times(10, times) == (6, 4)


def test_many_ranks_and_units():
    weights = [1 + rank % 17 for rank in range(1000)]
    counts = apportion(10_000, weights)
    assert sum(counts) == 10_000
    assert max(Fraction(n, w) for n, w in zip(counts, weights)) <= min(
        Fraction(n + 1, w) for n, w in zip(counts, weights)
    )
    by_time = apportion_times(10_000, [lambda n, cost=12252240 // weight: n * cost for weight in weights])
    assert by_time == counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, (1, 1), (4, 3)), r"10 do not fit: weights \(1, 1\) have room for 7, 3 too few"),
        ((1, (0, 0)), "have room for 0, 1 too few"),
        ((5, (1, 0), (4, 9)), "have room for 4, 1 too few"),
        ((1, ()), "have room for 0, 1 too few"),
        ((-1, (1,)), "total = -1"),
        ((1, (1, -2)), r"weights \(1, -2\)"),
        ((1, (1, 2), (1,)), "Expected 2 whole numbers"),
        ((1, (1, 2), (1, -1)), r"caps \(1, -1\)"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments, message):
    with pytest.raises(SettingError, match=message):
        apportion(*arguments)


def test_times_that_cannot_be_split_are_refused():
    with pytest.raises(SettingError, match="10 do not fit: 2 ranks have room for 7, 3 too few"):
        apportion_times(10, [lambda n: n] * 2, (4, 3))
    with pytest.raises(SettingError, match="rank 0 decrease from 9 to 8 us at 2 pieces"):
        apportion_times(3, [lambda n: 10 - n])
