import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.profile import DeviceProfile, Memory, Timing
from ragtag.cost.device import backward_s, curve, even_s, largest_micro_batch, memory_bytes, split_s, time_s


def device(timings, **fields):
    return DeviceProfile(
        name="d", timings=tuple(Timing(samples=size, seconds=seconds) for size, seconds in timings), **fields
    )


timings = st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 10)), min_size=1, max_size=6).map(
    lambda pairs: sorted(dict(pairs).items())
)


@given(timings, st.integers(0, 400), st.integers(1, 60), st.booleans())
def test_more_samples_never_take_less(measured, samples, micro_batch, recompute):
    one = device(measured)
    assert time_s(one, samples, micro_batch, recompute) <= time_s(one, samples + 1, micro_batch, recompute) + 1e-12


@given(timings, st.integers(0, 300), st.integers(1, 9))
def test_pieces_of_equal_size_never_take_less_for_more_samples(measured, samples, pieces):
    own = curve(device(measured))
    assert even_s(own, samples, pieces) <= even_s(own, samples + 1, pieces) + 1e-12


def test_measured_sizes_come_back_and_others_lie_on_lines():
    one = device([(2, 3.0), (4, 5.0), (8, 9.0)])
    assert [time_s(one, size, 100) for size in (2, 3, 4, 6, 8, 16)] == [3.0, 4.0, 5.0, 7.0, 9.0, 17.0]
    # The line's start is what a micro-batch costs whatever its size.
    assert time_s(one, 1, 100) == 2.0
    assert time_s(one, 10, 4) == 2 * 5.0 + 3.0
    assert split_s(curve(one), 0, 4) == 0


def test_one_timing_is_taken_as_proportional():
    assert time_s(device([(4, 2.0)]), 8, 100) == 4.0


def test_noise_does_not_make_more_work_quicker_nor_set_the_slope_beyond():
    one = device([(8, 0.8), (16, 1.6), (31, 3.3), (32, 3.2)])
    assert time_s(one, 32, 100) == 3.3
    assert time_s(one, 64, 100) == pytest.approx(3.3 + 32 * (3.3 - 1.6) / 16)


def test_recompute_that_was_not_timed_costs_one_more_forward():
    one = device([(1, 3.0), (2, 6.0)], forward_part=1 / 3)
    assert time_s(one, 2, 2, recompute=True) == pytest.approx(8.0)
    assert backward_s(one, 2) == pytest.approx(4.0)
    timed = device([(1, 3.0)], recompute_timings=(Timing(samples=1, seconds=3.5),))
    assert time_s(timed, 1, 1, recompute=True) == 3.5


@given(st.integers(0, 10**9), st.integers(1, 10**7), st.integers(1, 10**10), st.booleans())
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(fixed, per_sample, capacity, recompute):
    memory = Memory(fixed_bytes=fixed, per_sample_bytes=2 * per_sample, recompute_per_sample_bytes=per_sample)
    one = device([(1, 1.0)], memory=memory, capacity_bytes=capacity)
    largest = largest_micro_batch(one, recompute)
    assert largest is not None
    assert largest == 0 or memory_bytes(one, largest, recompute) <= capacity
    assert memory_bytes(one, largest + 1, recompute) > capacity


def test_what_was_not_measured_limits_nothing_and_is_said_to_be_unknown():
    one = device([(1, 1.0)], capacity_bytes=10)
    assert largest_micro_batch(one) is None
    assert memory_bytes(one, 1) is None
    known = device([(1, 1.0)], capacity_bytes=10, memory=Memory(fixed_bytes=1, per_sample_bytes=1))
    assert memory_bytes(known, 1, recompute=True) is None
