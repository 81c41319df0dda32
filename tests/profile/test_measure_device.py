import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.errors import RagtagError
from ragtag.profile.device import Effort, measure_device
from ragtag.profile.probe import SimulatedProbe
from ragtag.profile.repeat import repeat_in_turn


def measured(probe, *, least=1, most=64, **words):
    return measure_device(probe, name="box", uuid="u", kind="cpu", least=least, most=most, clock=probe.clock, **words)


def test_a_device_is_described_as_it_is():
    probe = SimulatedProbe(sample_s=0.01, micro_batch_s=0.002, optimizer_s=0.005, fixed_s=0.001, capacity_bytes=3450)
    device = measured(probe)
    assert [timing.samples for timing in device.timings] == [1, 2, 4, 8, 16, 24]
    for timing in device.timings:
        assert math.isclose(timing.seconds, 0.002 + 0.01 * timing.samples)
    assert device.memory.fixed_bytes + 24 * device.memory.per_sample_bytes == 3400
    assert device.memory.fixed_bytes + 25 * device.memory.per_sample_bytes > 3450
    recompute = device.memory.recompute_per_sample_bytes or 0
    assert device.memory.fixed_bytes + 61 * recompute <= 3450 < device.memory.fixed_bytes + 62 * recompute
    assert device.recompute_timings[-1].samples == 61
    assert math.isclose(device.forward_part, 1 / 3)
    assert device.bucket_ready == pytest.approx((0.75, 1.0))
    assert math.isclose(device.optimizer_s, 0.005)
    assert math.isclose(device.fixed_s, 0.001)
    assert device.jitter < 1e-9
    assert device.notes == ()


def test_what_cannot_be_recomputed_is_said():
    device = measured(SimulatedProbe(refusal="there are no blocks"))
    assert device.recompute_timings == ()
    assert device.memory.recompute_per_sample_bytes is None
    assert "there are no blocks" in device.notes[0]


def test_a_device_on_which_nothing_fits_is_named():
    with pytest.raises(
        RagtagError, match=r"Device 'box' cannot train.*1 kB.*it has 1.05 kB.*With activation recompute"
    ):
        measured(SimulatedProbe(capacity_bytes=1050))


@given(sample_s=st.floats(1e-4, 3.0), most=st.integers(1, 512))
def test_measuring_a_slow_device_ends_in_time(sample_s, most):
    probe = SimulatedProbe(sample_s=sample_s, micro_batch_s=0.0)
    effort = Effort(timing_s=5.0, recompute_s=2.0, update_s=1.0, longest_try_s=1.0)
    device = measured(probe, most=most, effort=effort)
    # The smallest size is measured whatever it takes: two to warm up and three repetitions.
    assert probe.now_s < 2 * (5.0 + 2.0 + 1.0) + 8 * 1.0 + 40 * sample_s * 4 / 3 * max(1, min(most, 1 / sample_s))
    assert math.isclose(device.timings[0].seconds, sample_s, rel_tol=1e-6)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True), budget_s=st.floats(0.1, 20))
def test_repetitions_are_in_turn_and_within_the_budget(sizes, budget_s):
    now, done = [0.0], []

    def run(size):
        done.append(size)
        now[0] += 0.01 * size
        return 0.01 * size

    sizes = sorted(sizes)
    results = repeat_in_turn(
        run, sizes, seconds_of=float, budget_s=budget_s, clock=lambda: now[0], least=3, enough=5, most=9
    )
    kept = list(results)
    assert kept == sizes[: len(kept)]
    assert kept
    counts = {len(each) for each in results.values()}
    assert len(counts) == 1
    assert 3 <= counts.pop() <= 9
    assert done[1 + len(kept) :] == kept * len(results[kept[0]])
    if len(kept) > 1:
        assert now[0] <= budget_s + 0.01 * sizes[0] + 1e-9


def test_noisy_sizes_are_repeated_more_often():
    def repetitions(values):
        ring = iter(values * 100)
        found = repeat_in_turn(
            lambda size: next(ring), [1], seconds_of=float, budget_s=1.0, clock=lambda: 0.0, enough=5, most=50
        )
        return len(found[1])

    assert repetitions([1.0]) == 5
    assert repetitions([1.0, 1.5, 0.7, 1.2]) == 50
