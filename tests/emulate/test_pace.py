import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ragtag.core.cluster import Device, Emulation, Stall
from ragtag.core.errors import SettingError
from ragtag.emulate.pace import DevicePace, NoPace
from ragtag.emulate.schedule import DeviceSchedule
from ragtag.emulate.solo import plain_step, solo_speed
from tests.emulate.fake_time import FakeTime, Layer

ONE = torch.ones(1)


def make_pace(time, *, sample_s=0.1, stall=(), **costs):
    schedule = DeviceSchedule(device=Device(name="box", stall=stall), emulation=Emulation(sample_s=sample_s, **costs))
    return DevicePace(schedule, clock=time.clock, cpu_clock=time.cpu_clock, sleep=time.sleep)


def make_model(time, num_layers=4):
    return nn.Sequential(*(Layer(time) for _ in range(num_layers)))


def arrivals(time, model):
    """When each parameter's gradient reaches a post-accumulate hook, on the fake clock."""
    moments = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: moments.append((name, time.now_s)))
    return moments


def run(pace, model, samples=1, regions=1):
    for _ in range(regions):
        with pace.forward_backward(samples):
            model(ONE).sum().backward()


def test_a_region_takes_the_devices_time_whatever_the_work():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    for samples in (1, 3, 2):
        before_s = time.now_s
        run(pace, model, samples)
        assert time.now_s - before_s == pytest.approx(0.1 * samples)
    assert pace.honest


def test_gradients_are_ready_when_the_device_would_have_them():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    moments = arrivals(time, model)  # registered first, and still after the pace
    pace.attach(model)
    run(pace, model)  # learns: 4 ms of forward, then a gradient every 2 ms
    moments.clear()
    begin_s = time.now_s
    run(pace, model, samples=3)
    assert [name for name, _ in moments] == ["3.scale", "2.scale", "1.scale", "0.scale"]
    expected = [0.3 * (4 + 2 * number) / 12 for number in (1, 2, 3, 4)]
    assert [moment - begin_s for _, moment in moments] == pytest.approx(expected)


def test_forward_takes_its_own_part():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    with pace.forward_backward(1):
        loss = model(ONE).sum()
        assert time.now_s - begin_s == pytest.approx(0.1 * 4 / 12)
        loss.backward()


def test_contention_does_not_move_the_schedule():
    time = FakeTime(wall_factor=5)  # 12 ms of CPU time take 60 ms of the 100
    pace, model = make_pace(time), make_model(time)
    moments = arrivals(time, model)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    moments.clear()
    run(pace, model)
    expected = [0.1 * (4 + 2 * number) / 12 for number in (1, 2, 3, 4)]
    assert [moment - begin_s for _, moment in moments] == pytest.approx(expected)
    assert pace.honest


@given(st.floats(0, 4e-4), st.integers(20, 60))
def test_oversleep_does_not_add_up(oversleep_s, regions):
    time = FakeTime(oversleep_s=oversleep_s)
    pace, model = make_pace(time, sample_s=0.02, optimizer_s=0.006), make_model(time)
    pace.attach(model)
    begin_s = time.now_s
    for _ in range(regions):
        run(pace, model)
        with pace.optimizer():
            time.work(0.001)
    assert time.now_s - begin_s == pytest.approx(regions * 0.026, abs=2 * oversleep_s + 1e-9)
    assert pace.honest


def test_waiting_inside_backward_after_the_last_gradient_is_not_compute():
    # As DDP does: its reducer waits for the all-reduce inside `backward()`.
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    with pace.forward_backward(1):
        model(ONE).sum().backward()
        time.wait(0.05)
    assert time.now_s - begin_s == pytest.approx(0.15)
    before_s = time.now_s
    run(pace, model)
    assert time.now_s - before_s == pytest.approx(0.1)
    assert pace.report().overruns == 0
    assert pace.honest


def test_work_that_does_not_fit_is_said_with_numbers():
    time = FakeTime()
    pace, model = make_pace(time, sample_s=0.01), make_model(time)  # 12 ms of work in 10 ms
    pace.attach(model)
    run(pace, model, regions=20)
    report = pace.report()
    assert not pace.honest
    assert not report.honest
    assert report.overruns == report.regions == 20
    assert report.worst_overrun_s == pytest.approx(0.002)
    # 40 ms too long in all; a region may make good 1 ms, and the last one's 3 ms are not lost yet.
    assert report.lost_s == pytest.approx(0.037)
    assert "could not keep its pace" in report.line
    assert "12.00 ms of CPU time" in report.line
    assert "paced to 10.00 ms" in report.line
    assert "sample_ms" in report.line


def test_one_late_region_is_made_good_by_the_next():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    run(pace, model, regions=30)
    begin_s = time.now_s
    with pace.forward_backward(1):
        time.work(0.096)  # somebody else had the core
        model(ONE).sum().backward()
    assert time.now_s - begin_s == pytest.approx(0.108)
    run(pace, model)
    assert time.now_s - begin_s == pytest.approx(0.2)
    assert pace.report().overruns == 1
    assert pace.honest


def test_evaluation_takes_the_forward_part_and_no_micro_batch_number():
    time = FakeTime()
    pace = make_pace(time, jitter=0.5, jitter_per="micro_batch")
    model = make_model(time)
    schedule = pace._schedule
    pace.attach(model)
    pace.step(3)
    run(pace, model)
    begin_s = time.now_s
    with torch.no_grad(), pace.forward_backward(2):
        model(ONE)
    assert time.now_s - begin_s == pytest.approx(schedule.compute_s(3, 1, 2) * 4 / 12)
    begin_s = time.now_s
    run(pace, model)
    assert time.now_s - begin_s == pytest.approx(schedule.compute_s(3, 1, 1))


def test_micro_batches_count_from_the_step_and_a_stall_comes_before_its_own():
    time = FakeTime()
    pace, model = make_pace(time, stall=(Stall(step=2, micro_batch=1, seconds=2.0),)), make_model(time)
    pace.attach(model)
    took = []
    for step in (1, 2):
        pace.step(step)
        for _ in range(2):
            begin_s = time.now_s
            run(pace, model)
            took.append(time.now_s - begin_s)
    assert took == pytest.approx([0.1, 0.1, 0.1, 2.1])
    assert pace.honest


def test_optimizer_and_fixed_work_are_paced_where_they_have_a_cost():
    time = FakeTime()
    pace = make_pace(time, optimizer_s=0.01)
    with pace.optimizer():
        time.work(0.004)
    assert time.now_s == pytest.approx(100.01)
    with pace.fixed():
        time.work(0.004)
    assert time.now_s == pytest.approx(100.014)


def test_recomputation_frozen_and_shared_parameters():
    time = FakeTime()
    first, shared, frozen = Layer(time), Layer(time), Layer(time)
    frozen.scale.requires_grad_(False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([first, shared, frozen])

        def forward(self, x):
            x = checkpoint(first, x, use_reentrant=False)
            return shared(frozen(shared(x)))

    model = Model()
    pace = make_pace(time)
    moments = arrivals(time, first)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    moments.clear()
    run(pace, model)
    assert time.now_s - begin_s == pytest.approx(0.1)
    assert [moment - begin_s for _, moment in moments] == pytest.approx([0.1])
    assert len(shared.scale._backward_hooks) == 1
    assert not frozen.scale._backward_hooks
    assert pace.honest


def test_reentrant_recomputation_brings_a_shared_gradient_twice():
    time = FakeTime()
    shared = Layer(time)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(shared, x, use_reentrant=True)
            return x

    model = Model()
    pace = make_pace(time)
    moments = arrivals(time, shared)
    pace.attach(model)
    x = torch.ones(1, requires_grad=True)
    for _ in range(3):  # learns, makes good that its guess was wrong, is on time
        begin_s = time.now_s
        moments.clear()
        with pace.forward_backward(1):
            model(x).sum().backward()
    # 2 ms of forward, then twice 1 ms again and 2 ms of backward.
    assert [moment - begin_s for _, moment in moments] == pytest.approx([0.1 * 5 / 8, 0.1])


def test_a_layer_that_is_skipped_in_some_steps_does_not_shift_the_rest():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    moments = arrivals(time, model)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    moments.clear()
    with pace.forward_backward(1):
        model[3](model[0](ONE)).sum().backward()
    assert time.now_s - begin_s == pytest.approx(0.1)
    assert moments[0][1] - begin_s == pytest.approx(0.05)


def test_a_loss_without_gradient_takes_the_forward_part():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    with pace.forward_backward(1):
        model(ONE).detach()
    assert time.now_s - begin_s == pytest.approx(0.1 * 4 / 12)


def test_nothing_is_left_after_detach_and_a_copy_is_not_paced():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    before = [dict(module._forward_hooks) for module in model.modules()]
    pace.attach(model)
    twin = copy.deepcopy(model)
    with pace.forward_backward(1):
        begin_s = time.now_s
        twin(ONE).sum().backward()
        assert time.now_s - begin_s == pytest.approx(0.012)
        model(ONE).sum().backward()
    pace.detach()
    assert [dict(module._forward_hooks) for module in model.modules()] == before
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_backward_outside_a_region_is_not_paced():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    run(pace, model)
    begin_s = time.now_s
    model(ONE).sum().backward()
    assert time.now_s - begin_s == pytest.approx(0.012)


def test_an_error_in_a_region_passes_through_unpaced_and_the_next_region_works():
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    pace.attach(model)
    before_s = time.now_s
    with pytest.raises(KeyError), pace.forward_backward(1):
        raise KeyError("mine")
    assert time.now_s == before_s
    run(pace, model)
    assert time.now_s - before_s == pytest.approx(0.1)


def test_a_model_that_is_not_on_the_cpu_is_refused():
    with pytest.raises(SettingError, match=r"'weight' is on meta.*RAGTAG_DEVICE=cpu"):
        make_pace(FakeTime()).attach(nn.Linear(1, 1, device="meta"))


def test_pacing_leaves_gradients_bit_equal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    model(x).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    pace = make_pace(FakeTime())
    pace.attach(model)
    with pace.forward_backward(6):
        model(x).square().mean().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters()))


def test_solo_speed_is_the_schedules_own_and_meets_the_same_luck():
    time = FakeTime()
    pace = make_pace(time, jitter=0.3, optimizer_s=0.02, fixed_s=0.01)
    model = make_model(time)
    pace.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = plain_step(pace, model, optimizer, lambda m, x: m(x).sum(), lambda number: [(ONE, 3), (ONE, 2)])
    speed = solo_speed(pace, step, 20, first_step=5, clock=time.clock)
    expected_s = sum(pace._schedule.step_s(number, (3, 2)) for number in range(5, 25))
    assert speed.samples == 100
    assert speed.wall_s == pytest.approx(expected_s)
    assert speed.samples_per_s == pytest.approx(100 / expected_s)
    assert solo_speed(pace, step, 20, first_step=5, clock=time.clock).wall_s == pytest.approx(expected_s)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_pace_does_nothing():
    time = FakeTime()
    pace, model = NoPace(), make_model(time)
    pace.attach(model)
    pace.step(1)
    run(pace, model)
    with pace.optimizer(), pace.fixed():
        time.work(0.001)
    pace.detach()
    assert time.sleeps == []
    assert pace.honest
    assert pace.report() is None
