from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.control.pool_trial import STEPS
from ragtag.sim import following
from ragtag.sim.membership import Change, failures
from ragtag.sim.run import WAYS, Recovering, simulate

from ..control import simulated
from .clusters import four, many


def fails(at_s, rank):
    return Change(at_s=at_s, rank=rank, joins=False)


def joins(at_s, rank):
    return Change(at_s=at_s, rank=rank, joins=True)


@settings(max_examples=25)
@given(
    way=st.sampled_from(list(WAYS)),
    rate=st.sampled_from([0, 5, 60]),
    jitter=st.sampled_from([0, 0.3]),
    seed=st.integers(0, 3),
)
def test_every_sample_is_counted_once_and_time_adds_up(way, rate, jitter, seed):
    cluster = four(f"jitter = {jitter}\nseed = {seed}")
    changes = failures(4, duration_s=120, failures_per_hour=rate, repair_s=15, seed=seed)
    result = simulate(way, cluster, duration_s=120, changes=changes)
    if way == "dropping stragglers":
        assert result.samples <= result.steps * 44
    else:
        assert result.samples == result.steps * 44
    assert sum(device.samples for device in result.devices) == result.samples
    assert result.wall_s <= 120 + 31
    assert all(device.present_s <= result.wall_s + 1e-9 for device in result.devices)
    assert 0 <= result.wasted_device_hours <= result.device_hours or jitter
    assert 0 < result.eta < (1.25 if jitter else 1.0)
    for each in result.shares:
        assert sum(each.shares) == 44
    assert result == simulate(way, cluster, duration_s=120, changes=changes)


def test_even_batches_wait_for_the_slowest_and_ragtag_does_not():
    cluster = four()
    even = simulate("even DDP", cluster, steps=200)
    assert even.steps == 200
    assert even.wall_s == pytest.approx(200 * (11 * 0.16 + 0.032 + 0.00005), rel=0.01)
    assert even.eta == pytest.approx(0.36, abs=0.01)
    assert simulate("ragtag", cluster, steps=200).eta > 0.93


def test_the_controller_is_the_one_of_the_tests():
    """The same speeds as `tests/control/simulated.py`: the same decisions."""
    cluster = four("fixed_ms = 0")
    result = simulate("ragtag", cluster, steps=60)
    devices = simulated.Devices(
        speeds=(0.25, 0.25, 0.125, 0.0625),
        apply_s=(0.008, 0.008, 0.016, 0.032),
        comm_s=cluster.ring(np.ones(4, dtype=bool)).vote_s,
    )
    expected = simulated.run(devices, 44, 60).controller.history
    assert [decision.plan.shares for decision in result.decisions] == [decision.plan.shares for decision in expected]
    assert [decision.step for decision in result.decisions] == [decision.step for decision in expected]


def test_a_failure_costs_ragtag_no_step_and_others_their_work_since_the_checkpoint():
    cluster, changes = four(), [fails(100.3, 3), joins(160, 3)]
    costs = Recovering(restart_s=20, checkpoint_s=1, regroup_s=0.5)
    ours = simulate("ragtag", cluster, duration_s=300, changes=changes, recovering=costs)
    even = simulate("even DDP", cluster, duration_s=300, changes=changes, recovering=costs)
    assert 0.5 < ours.incidents[0].lost_s < 3
    # Since the checkpoint, and the restart.
    assert 20 < even.incidents[0].lost_s < 20 + 15
    assert ours.lost_s < 4
    # It has no share while it is away, and one again when it is back.
    assert [each.shares[3] for each in ours.shares if each.at_s < 160][-1] == 0
    assert ours.shares[-1].shares[3] > 0


def test_training_waits_while_nobody_is_there():
    changes = [fails(10 + rank, rank) for rank in range(4)] + [joins(50, 2), joins(70, 0)]
    for way in WAYS:
        result = simulate(way, four(), duration_s=200, changes=changes)
        assert result.devices[2].samples > result.devices[3].samples
        assert result.devices[1].present_s == pytest.approx(11, abs=2.5)
        assert 0 < result.eta < 1


def test_who_joins_late_gets_a_share():
    result = simulate("ragtag", four(), duration_s=200, changes=[joins(60, 1)])
    assert result.shares[0].shares[1] == 0
    assert result.shares[-1].shares[1] > 10
    assert result.devices[1].present_s == pytest.approx(result.wall_s - 60, abs=2)


def test_a_stalled_rank_is_stood_in_for():
    cluster = four(b="stall = [{step = 50, seconds = 20.0}]")
    even = simulate("even DDP", cluster, steps=80)
    ours = simulate("ragtag", cluster, steps=80)
    usual_even = simulate("even DDP", four(), steps=80)
    usual = simulate("ragtag", four(), steps=80)
    assert even.wall_s - usual_even.wall_s == pytest.approx(20, abs=2)
    # The others are a quarter slower without it, for 20 s.
    assert 1 < ours.wall_s - usual.wall_s < 8
    assert ours.samples == 80 * 44


def test_drift_is_followed():
    cluster = four(c="drift = [{step = 50, speed = 0.25}, {step = 60, speed = 1.0}]")
    result = simulate("ragtag", cluster, steps=200)
    assert result.shares[-1].shares[3] > 2 * result.shares[1].shares[3]
    assert all(0.5 < device.useful_s / device.present_s <= 1 for device in result.devices)
    assert 0.8 < result.eta < 1


def test_a_short_stall_is_waited_for():
    stalling = simulate("ragtag", four(b="stall = [{step = 50, seconds = 0.12}]"), steps=80)
    usual = simulate("ragtag", four(), steps=80)
    assert 0.08 < stalling.wall_s - usual.wall_s < 0.13
    assert stalling.devices[2].samples == usual.devices[2].samples


def test_dropping_the_slowest_is_quicker_than_waiting_but_throws_work_away():
    cluster = many(20)
    dropping = simulate("dropping stragglers", cluster, steps=100)
    even = simulate("even DDP", cluster, steps=100)
    assert dropping.eta > 1.1 * even.eta
    assert dropping.samples < 100 * cluster.batch
    assert sum(device.busy_s for device in dropping.devices) > sum(device.useful_s for device in dropping.devices)


def test_showing_the_controller_fewer_steps_changes_little(monkeypatch):
    cluster = many(80)
    changes = failures(80, duration_s=400, failures_per_hour=1, repair_s=100, seed=0)
    assert len(changes) > 4
    seldom = simulate("ragtag", cluster, duration_s=400, changes=changes)
    monkeypatch.setattr(following, "_ALWAYS_WATCHED", 10**6)
    always = simulate("ragtag", cluster, duration_s=400, changes=changes)
    assert seldom.eta == pytest.approx(always.eta, rel=0.03)


def test_where_times_vary_work_is_pulled(monkeypatch):
    cluster = four("jitter = 0.3")
    pulled = simulate("ragtag", cluster, steps=300)
    monkeypatch.setattr(following.FollowingSpeeds, "_pool", lambda self: ())
    planned = simulate("ragtag", cluster, steps=300)
    assert pulled.eta > 1.15 * planned.eta


def test_units_are_pulled_and_every_sample_still_counts():
    for jitter, batch in ((0.3, 45), (0.0, 44)):
        cluster = four(f"jitter = {jitter}", batch=batch)
        facts = msgspec.structs.replace(cluster.problem.model, unit=4)
        cluster = replace(cluster, problem=msgspec.structs.replace(cluster.problem, model=facts))
        changes = [fails(20, 1), joins(40, 1)]
        result = simulate("ragtag", cluster, duration_s=80, changes=changes)
        assert result.samples == result.steps * batch
        assert all(sum(each.shares) == batch for each in result.shares)
        assert 0.5 < result.eta < 1.25


def test_pulling_is_tried_and_given_up_where_it_is_slower():
    cluster = four("jitter = 0.3")
    pulled = []

    class Watched(following.FollowingSpeeds):
        def commit(self, block, now_s):
            super().commit(replace(block, wall_s=block.wall_s * (2.0 if self._plan.pulled else 1.0)), now_s)
            pulled.append(bool(self._plan.pulled))

    training = Watched(cluster, np.ones(4, dtype=bool))
    for step in range(1, 90):
        training.commit(training.block(step, 1, float(step)), float(step))
    first = pulled.index(True)
    assert pulled[first : first + STEPS] == [True] * STEPS
    assert not any(pulled[first + STEPS :])
    assert "does not pay" in training._trial.verdict


def test_a_trial_sees_every_step_also_where_the_controller_does_not():
    cluster = many(80, "jitter = 0.2")
    training = following.FollowingSpeeds(cluster, np.ones(80, dtype=bool))
    step, sizes = 1, []
    while step < 400 and not training._trial.kept:
        block = training.block(step, 50, 0.0)
        trial, pulled = training._trial, bool(training._plan.pulled)
        training.commit(block, 0.0)
        step += len(block)
        if trial.under_way:
            assert pulled == trial.pulls
            sizes.append(len(block))
    assert training._trial.kept
    assert sum(sizes) == 2 * STEPS
    assert len(sizes) < STEPS
