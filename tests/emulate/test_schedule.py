from math import log
from statistics import fmean, stdev

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.cluster import Device, DriftPoint, Emulation, Flip, Stall
from ragtag.emulate.schedule import DeviceSchedule

COSTS = Emulation(sample_s=0.04, micro_batch_s=0.002, optimizer_s=0.01, fixed_s=0.003)


def schedule(emulation=COSTS, **device):
    return DeviceSchedule(device=Device(name="box", **device), emulation=emulation)


def test_work_takes_its_cost_over_the_speed():
    slow = schedule(speed=0.25)
    assert slow.compute_s(1, 0, 3) == pytest.approx(4 * (0.002 + 3 * 0.04))
    assert slow.optimizer_s(1) == pytest.approx(0.04)
    assert slow.fixed_s(1) == pytest.approx(0.012)
    assert slow.step_s(1, (3, 2)) == pytest.approx(4 * (2 * 0.002 + 5 * 0.04 + 0.01 + 0.003))


def test_speed_slides_from_point_to_point_and_stays():
    sliding = schedule(drift=(DriftPoint(step=50, speed=1.0), DriftPoint(step=100, speed=0.6)))
    assert [sliding.speed_at(step) for step in (1, 50, 75, 100, 1000)] == pytest.approx([1, 1, 0.8, 0.6, 0.6])


def test_speed_jumps_at_its_points():
    shared = schedule(drift=(DriftPoint(step=30, speed=0.5), DriftPoint(step=50, speed=1.0)), drift_kind="step")
    assert [shared.speed_at(step) for step in (1, 29, 30, 49, 50, 99)] == [1, 1, 0.5, 0.5, 1, 1]


def test_speed_flips_every_period():
    flipping = schedule(flip=Flip(period=5, speed=0.5))
    assert [flipping.speed_at(step) for step in range(1, 16)] == [1] * 5 + [0.5] * 5 + [1] * 5


def test_a_stall_is_before_its_micro_batch_only():
    stalling = schedule(stall=(Stall(step=12, micro_batch=1, seconds=2.0),))
    assert stalling.stall_s(12, 1) == 2.0
    assert stalling.stall_s(12, 0) == stalling.stall_s(11, 1) == 0
    assert stalling.step_s(12, (1, 1)) - stalling.step_s(11, (1, 1)) == pytest.approx(2.0)


def test_jitter_is_log_normal_with_the_given_sigma():
    jittery = schedule(msgspec.structs.replace(COSTS, jitter=0.3))
    logs = [log(jittery.compute_s(step, 0, 1) / 0.042) for step in range(1, 2001)]
    assert abs(fmean(logs)) < 0.03
    assert stdev(logs) == pytest.approx(0.3, rel=0.08)


@given(st.integers(1, 10**6), st.integers(0, 100), st.integers(0, 1000))
def test_luck_depends_on_step_or_micro_batch_as_asked(step, micro_batch, samples):
    per_step = schedule(msgspec.structs.replace(COSTS, jitter=0.3))
    per_micro_batch = schedule(msgspec.structs.replace(COSTS, jitter=0.3, jitter_per="micro_batch"))
    assert per_step.compute_s(step, micro_batch, samples) == per_step.compute_s(step, 0, samples)
    slowdown = per_step.compute_s(step, 0, 1) / 0.042
    assert per_step.optimizer_s(step) / 0.01 == pytest.approx(slowdown)
    assert per_micro_batch.optimizer_s(step) == 0.01
    first, second = (per_micro_batch.compute_s(step, index, 1) for index in (micro_batch, micro_batch + 1))
    assert first != second
    assert first == per_micro_batch.compute_s(step, micro_batch, 1)


def test_devices_and_seeds_have_their_own_luck():
    emulation = msgspec.structs.replace(COSTS, jitter=0.3)
    reseeded = msgspec.structs.replace(emulation, seed=1)
    other = DeviceSchedule(device=Device(name="other"), emulation=emulation)
    times = {each.compute_s(1, 0, 1) for each in (schedule(emulation), schedule(reseeded), other)}
    assert len(times) == 3
