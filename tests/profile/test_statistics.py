import math
import random

from hypothesis import given
from hypothesis import strategies as st

from ragtag.profile.statistics import half_spread, is_precise, quantile, relative_deviation

seconds = st.floats(1e-6, 1e3)
several = st.lists(seconds, min_size=1, max_size=30)


@given(several, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_are_within_the_values_and_grow(values, part, other):
    low, high = sorted((part, other))
    assert min(values) <= quantile(values, low) <= quantile(values, high) <= max(values)


@given(several, st.floats(0.1, 10))
def test_the_spread_scales_with_the_values_and_one_outlier_of_forty_does_not_count(values, factor):
    assert half_spread(values) >= 0
    assert math.isclose(half_spread([factor * v for v in values]), factor * half_spread(values), abs_tol=1e-9)
    assert half_spread([1.0] * 39 + [1000.0]) == 0


@given(st.lists(st.lists(seconds, min_size=1, max_size=10), max_size=5), st.floats(0.01, 100))
def test_the_deviation_does_not_care_for_the_sizes_of_groups(groups, factor):
    scaled = [[factor * value for value in group] for group in groups]
    assert math.isclose(relative_deviation(groups), relative_deviation(scaled), rel_tol=1e-6, abs_tol=1e-9)


def test_the_deviation_of_log_normal_work_is_its_sigma():
    draw = random.Random(0)
    groups = [[size * math.exp(0.1 * draw.gauss(0, 1)) for _ in range(60)] for size in (1, 2, 4, 8)]
    assert 0.085 < relative_deviation(groups) < 0.125
    assert relative_deviation([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]) == 0
    assert relative_deviation([[1.0], [2.0, 3.0]]) == 0


def test_precision_grows_with_the_number_of_values():
    values = [0.9, 1.0, 1.1]
    assert not is_precise(values, 0.02)
    assert is_precise(values * 60, 0.02)
    assert not is_precise([1.0], 0.5)
