"""Pulling policy: when it begins and ends, how much is claimed, and that the pool is always drained."""

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.pulling import accepts, choose_pool, claim_size
from ragtag.control.sharing import initial_plan, units_per_rank


def plan_of(*shares):
    return initial_plan(world_size=len(shares), global_batch_size=sum(shares), unit=1, shares=shares)


def choose(noise, *, pulling=False, wanted=None, shares=(16, 16, 8, 4)):
    plan = plan_of(*shares)
    units = units_per_rank(plan, sum(shares))
    return choose_pool(plan, units, [noise] * len(shares), pulling=pulling, wanted=wanted)


def test_quiet_ranks_pull_nothing_and_noisy_ones_do():
    assert choose(0.01).pulled == ()
    noisy = choose(0.3)
    assert noisy.pulled == (12, 12, 6, 3)
    assert noisy.predicted_gain == pytest.approx(1.03 * 0.3 / (1 + 1.03 * 0.3))
    assert "vary by 30 %" in noisy.reason


def test_it_begins_later_than_it_ends():
    between = 0.035  # a gain of 3.5 %
    assert choose(between).pulled == ()
    assert choose(between, pulling=True).pulled != ()
    assert choose(0.01, pulling=True).pulled == ()


def test_the_user_has_the_last_word():
    assert choose(0.3, wanted=False).pulled == ()
    assert choose(0.0, wanted=True).pulled != ()


def test_one_working_rank_has_nobody_to_pull_from():
    assert choose(0.5, shares=(10, 0)).pulled == ()


@given(st.integers(1, 10_000), st.floats(0.0, 1.0))
def test_a_claim_is_at_least_one_and_at_most_half_of_the_part(remaining, part):
    assert 1 <= claim_size(remaining, part) <= max(1, remaining * part / 2)


def accept(remaining, count, own_left_s, unit_s, rank, planned_left=None):
    return accepts(
        rank=rank,
        remaining=remaining,
        count=count,
        own_left_s=own_left_s,
        own_unit_s=unit_s[rank],
        unit_s=unit_s,
        planned_left=planned_left or [0.0] * len(unit_s),
    )


def drain(pool, unit_s, factors):
    """Ranks that claim one unit ahead, as the runtime does; returns who computed how many and when each was done."""
    left, counts, ends = pool, [0] * len(unit_s), [0.0] * len(unit_s)
    queue = [(0.0, rank) for rank, seconds in enumerate(unit_s) if seconds > 0]
    heapq.heapify(queue)
    per_s = [1 / seconds if seconds > 0 else 0.0 for seconds in unit_s]
    while queue:
        now, rank = heapq.heappop(queue)
        ends[rank] = now
        if left <= 0:
            continue
        count = min(left, claim_size(left, per_s[rank] / sum(per_s)))
        while count and not accept(left, count, 0.0, unit_s, rank):
            count //= 2
        if count:
            left -= count
            counts[rank] += count
            heapq.heappush(queue, (now + count * unit_s[rank] * factors[rank], rank))
    return left, counts, ends


@given(
    st.integers(0, 200),
    st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.1, 1.0]), min_size=1, max_size=8).filter(any),
    st.integers(0, 10_000),
)
def test_the_pool_is_always_drained_whatever_the_speeds(pool, unit_s, seed):
    generator = random.Random(seed)
    factors = [generator.choice([0.3, 1.0, 3.0, 30.0]) for _ in unit_s]
    left, counts, _ = drain(pool, unit_s, factors)
    assert left == 0
    assert sum(counts) == pool
    assert all(count == 0 for count, seconds in zip(counts, unit_s) if seconds == 0)


def test_a_slow_rank_leaves_the_last_units_to_the_fast_ones():
    assert not accept(1, 1, 0.0, [0.01, 0.01, 1.0], 2)
    assert accept(1000, 1, 0.0, [0.01, 0.01, 1.0], 2)
    assert accept(1, 1, 5.0, [0.01, 0.01, 1.0], 0), "the fastest never declines"
    assert not accept(5, 1, 0.0, [0.01, 0.0], 1), "a rank without work claims nothing"


def test_a_rank_counts_the_work_that_others_have_still_before_them():
    own_left_s, unit_s = 0.3, [0.04, 0.041]
    assert not accept(4, 1, own_left_s, unit_s, 1)
    assert accept(4, 1, own_left_s, unit_s, 1, planned_left=[8.0, 0.0])
