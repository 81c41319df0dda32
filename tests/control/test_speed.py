import math
import random
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.robust import log_ratio, median, midmean, upper_quartile
from ragtag.control.speed import Speed
from ragtag.control.window import WINDOW


def watch(speed, steps):
    return reduce(lambda so_far, step: so_far.observe(*step), steps, speed)


def noisy(level, count, *, samples=10, sigma=0.02, seed=0):
    draws = random.Random(seed)
    return [(samples, 1, level * samples * (1 + draws.gauss(0, sigma))) for _ in range(count)]


def test_two_steps_that_agree_are_enough_and_one_is_not():
    one = Speed().observe(10, 1, 0.1)
    assert not one.known
    two = one.observe(10, 1, 0.11)
    assert two.known
    assert two.time_s(20, 1) == pytest.approx(0.21)


def test_a_slow_first_step_is_waited_out_and_forgotten():
    speed = watch(Speed(), [(10, 1, 3.0), (10, 1, 0.1)])
    assert not speed.known
    speed = speed.observe(10, 1, 0.1)
    assert speed.known
    assert speed.level_s == pytest.approx(0.01)


@given(st.integers(3, 40), st.floats(0.05, 20), st.integers(0, 5))
def test_one_odd_step_hardly_moves_the_level(count, factor, seed):
    before = watch(Speed(), noisy(0.01, count, seed=seed))
    after = watch(before, [(10, 1, 0.1 * factor), *noisy(0.01, 2, seed=seed + 100)])
    assert after.level_s == pytest.approx(before.level_s, rel=0.05)


def test_two_odd_steps_with_a_usual_one_between_do_not_move_it():
    speed = watch(Speed(), [*noisy(0.01, 20), (10, 1, 1.0), (10, 1, 0.1), (10, 1, 1.0)])
    assert speed.level_s == pytest.approx(0.01, rel=0.03)


@pytest.mark.parametrize("factor", [4, 2, 1 / 2, 1 / 4])
@pytest.mark.parametrize("count", [3, 30, 300])
def test_two_steps_at_a_new_level_are_believed(count, factor):
    speed = watch(Speed(), [*noisy(0.01, count), *noisy(0.01 * factor, 2, seed=1)])
    assert speed.level_s == pytest.approx(0.01 * factor, rel=0.06)


def test_a_small_lasting_change_is_found_in_noise():
    speed = watch(Speed(), [*noisy(0.01, 60, sigma=0.1), *noisy(0.0125, 20, sigma=0.1, seed=1)])
    assert speed.level_s == pytest.approx(0.0125, rel=0.08)
    assert len(speed.steps) <= 22


def test_the_window_is_bounded_and_the_noise_measured():
    speed = watch(Speed(), noisy(0.01, 400, sigma=0.1))
    assert len(speed.steps) <= WINDOW
    assert speed.noise == pytest.approx(0.1, rel=0.5)


def test_noise_is_measured_where_pulled_work_makes_every_share_another():
    draws = random.Random(0)
    shares = [draws.randint(18, 22) for _ in range(60)]
    speed = watch(Speed(), [(n, 1, 0.01 * n * (1 + draws.gauss(0, 0.02))) for n in shares])
    assert speed.noise == pytest.approx(0.02, rel=0.5)
    assert speed.level_s == pytest.approx(0.01, rel=0.01)


def test_a_fixed_cost_is_learnt_from_one_change_of_share():
    cost, per_sample = 0.05, 0.01
    steps = [(n, 1, cost + per_sample * n) for n in [20] * 4 + [8] * 2]
    speed = watch(Speed(), steps)
    for n in (1, 8, 14, 20):
        assert speed.time_s(n, 1) == pytest.approx(cost + per_sample * n, rel=0.02)


def test_a_share_that_moves_to_and_fro_is_not_a_rank_that_flaps():
    shares = [20] * 6 + [40] * 4 + [20] * 4 + [40] * 4 + [20] * 4
    speed = watch(Speed(), [(n, 1, 1.0 + 0.01 * n) for n in shares])
    assert speed.patience == 2
    assert speed.time_s(20, 1) == pytest.approx(1.2, rel=0.02)


def test_the_cost_of_a_forward_is_told_from_that_of_a_step():
    shares = [(64, 2), (64, 8), (40, 5), (64, 2), (24, 6), (64, 8)]
    steps = [(n, k, 0.02 * k + 0.01 * n) for n, k in shares for _ in range(4)]
    speed = watch(Speed(), steps)
    assert speed.time_s(48, 3) == pytest.approx(0.54, rel=0.03)
    assert speed.time_s(48, 12) == pytest.approx(0.72, rel=0.03)


def test_a_drift_that_shares_make_up_for_is_not_taken_for_a_fixed_cost():
    # The controller gives a rank that slows down less and less, so that its time stays the same.
    steps = [(n, 1, 1.0) for n in range(100, 50, -2) for _ in range(3)]
    speed = watch(Speed(), steps)
    assert speed.level_s * (speed.fixed.per_step + speed.fixed.per_forward) < 0.2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5), st.floats(allow_nan=True)), max_size=60))
def test_nothing_it_is_told_breaks_it(steps):
    speed = watch(Speed(), steps)
    assert 0 <= speed.level_s < 1e9
    times = [speed.time_s(n, 1) for n in range(60)]
    assert times == sorted(times)
    assert times[0] == 0


@pytest.mark.parametrize("seconds", [5e-324, 1e-12, float("nan"), float("inf"), -1.0])
def test_an_impossible_time_says_nothing(seconds):
    speed = watch(Speed(), noisy(0.01, 3))
    after = speed.observe(10, 1, seconds)
    assert (after.steps, after.level_s, after.jumps) == (speed.steps, speed.level_s, speed.jumps)


@given(st.lists(st.sampled_from([0.9, 0.95, 1.0, 1.05, 1.1, 2.0]), min_size=1, max_size=90))
def test_the_usual_jump_is_the_median_of_those_remembered(factors):
    speed = watch(Speed(), [(10, 1, 0.1 * factor) for factor in factors])
    assert speed.usual_jump == median((*speed.jumps, 0.1, 0.1, 0.1))


def test_a_rank_that_flaps_is_planned_for_at_its_slower_speed():
    levels = [0.01 if step // 5 % 2 else 0.02 for step in range(100)]
    speed, planned = Speed(), []
    for level in levels:
        speed = speed.observe(10, 1, level * 10)
        planned.append(speed.level_s)
    assert planned[40:] == pytest.approx([0.02] * 60)
    recovered = watch(speed, noisy(0.01, 32))
    assert recovered.level_s == pytest.approx(0.01, rel=0.02)
    assert watch(recovered, noisy(0.01, 300)).patience == 2


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_robust_averages_lie_between_the_values(values):
    for average in (midmean, median, upper_quartile):
        assert min(values) * (1 - 1e-12) <= average(values) <= max(values) * (1 + 1e-12)
    assert sum(value > upper_quartile(values) for value in values) <= len(values) / 4


def test_log_ratio_is_odd_and_near_the_logarithm():
    assert log_ratio(1.2, 1.0) == pytest.approx(0.1823, abs=0.001)
    assert log_ratio(1.0, 1.2) == -log_ratio(1.2, 1.0)


def test_pulled_samples_teach_no_fixed_cost():
    random_numbers = random.Random(3)
    speed = Speed()
    for _ in range(200):
        slowdown = math.exp(0.3 * random_numbers.gauss(0, 1))
        samples = max(1, round(16 / slowdown))  # who is fast in a step gets more of it
        speed = speed.observe(samples, 3, 0.04 * samples * slowdown, planned=False)
    assert speed.fixed.size(10, 3) == 10, "nothing but the samples costs time"
    assert speed.level_s == pytest.approx(0.04, rel=0.15)
