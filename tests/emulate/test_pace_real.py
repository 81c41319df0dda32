import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ragtag.comm.group import SoloGroup
from ragtag.core.cluster import Device, Emulation
from ragtag.emulate.pace import DevicePace
from ragtag.emulate.schedule import DeviceSchedule
from ragtag.emulate.solo import plain_step, solo_speed
from ragtag.runtime.gradients import GradientSums
from tests.emulate.fake_time import FakeTime
from tests.emulate.test_pace import ONE, make_model, make_pace

FRACTIONS = [(4 + 2 * number) / 12 for number in (1, 2, 3, 4)]


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("attach_first", [True, False])
def test_ddp_gets_each_gradient_when_the_device_would_have_it(world_of_one, attach_first):
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    if attach_first:
        pace.attach(model)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    if not attach_first:
        pace.attach(model)
    launched = []

    def communicate(state, bucket):
        launched.append(time.now_s)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, communicate)
    for _ in range(3):  # after the first DDP makes its buckets anew
        begin_s = time.now_s
        launched.clear()
        with pace.forward_backward(1):
            wrapped(ONE).sum().backward()
        assert time.now_s - begin_s == pytest.approx(0.1)
    assert [moment - begin_s for moment in launched] == pytest.approx([0.1 * part for part in FRACTIONS])
    assert pace.honest


@pytest.mark.parametrize("attach_first", [True, False])
def test_ragtag_gets_each_gradient_when_the_device_would_have_it(attach_first, monkeypatch):
    time = FakeTime()
    pace, model = make_pace(time), make_model(time)
    if attach_first:
        pace.attach(model)
    seen = []
    on_gradient = GradientSums._on_gradient

    def recording(self, index, parameter):
        seen.append(time.now_s)
        on_gradient(self, index, parameter)

    monkeypatch.setattr(GradientSums, "_on_gradient", recording)
    sums = GradientSums(list(model.named_parameters()), SoloGroup(patience_s=10.0), bucket_bytes=1024)
    if not attach_first:
        pace.attach(model)
    for _ in range(2):
        begin_s = time.now_s
        seen.clear()
        sums.begin()
        sums.begin_backward(last=True)
        with pace.forward_backward(1):
            model(ONE).sum().backward()
        sums.launch_rest()
        sums.wait()
    assert [moment - begin_s for moment in seen] == pytest.approx([0.1 * part for part in FRACTIONS])
    sums.close()


def test_on_real_clocks_nothing_ends_early():
    # How late it may end is the machine's business: benchmarks measure it.
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    pace = DevicePace(DeviceSchedule(device=Device(name="box"), emulation=Emulation(sample_s=0.02, optimizer_s=0.01)))
    pace.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = plain_step(pace, model, optimizer, lambda m, x: m(x).sum(), lambda number: [(torch.ones(2, 16), 2)])
    speed = solo_speed(pace, step, 10)
    assert speed.wall_s > 0.495
    assert pace.report().regions == 20
