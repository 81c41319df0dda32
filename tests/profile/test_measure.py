import math
import os
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch
from tests.ranks import RankDied, run_ranks
from torch import nn

import ragtag
from ragtag.core.errors import PeerError, RagtagError
from ragtag.core.profile import load_profile
from ragtag.emulate.environment import from_environment
from ragtag.profile.device import Effort
from ragtag.runtime import trainer as trainer_module
from ragtag.runtime.blocks import find_blocks, recomputing
from ragtag.runtime.measure import measure

QUICK = Effort(timing_s=0.1, recompute_s=0.1, update_s=0.1, repetitions=3)


class Mlp(nn.Module):
    shape = (24,)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 64)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid()) for _ in range(3))
        )

    def forward(self, x):
        return self.blocks(torch.tanh(self.first(x)))


class Cnn(nn.Module):
    shape = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh())
            for i in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


class Gpt(nn.Module):
    shape = (12, 16)

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.body(x))


class Samples(torch.utils.data.Dataset):
    def __init__(self, shape):
        self.x = torch.randn(700, *shape, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


def loss_fn(model, x):
    return model(x).square().mean()


def trainer_of(model_class, optimizer_class, batch, **config):
    torch.manual_seed(0)
    model = model_class()
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    return ragtag.Trainer(
        model, optimizer, loss_fn, Samples(model_class.shape), global_batch_size=batch, config=ragtag.Config(**config)
    )


def cluster(tmp_path, text):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return str(file)


@pytest.fixture(autouse=True)
def own_cache_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def profile_of(trainer, tmp_path, effort=QUICK):
    return measure(trainer._run, tmp_path / "p.json", emulator=from_environment(os.environ, 0), effort=effort)


def noting_refusals(memory, monkeypatch):
    """Return a list that grows with each micro-batch for which memory is too small, whatever training makes of it."""
    refused, original = [], memory.forward_backward

    @contextmanager
    def forward_backward():
        try:
            with original():
                yield
        except torch.OutOfMemoryError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(memory, "forward_backward", forward_backward)
    return refused


@pytest.mark.parametrize(
    ("model_class", "optimizer_class"),
    [(model, optimizer) for model in (Mlp, Cnn, Gpt) for optimizer in (torch.optim.SGD, torch.optim.Adam)],
)
def test_the_largest_micro_batch_that_a_profile_allows_fits_and_one_more_does_not(
    model_class, optimizer_class, tmp_path, monkeypatch
):
    """In training, with recomputation and without, under an emulated cap, in steps of several micro-batches."""
    parameter_bytes = sum(parameter.nbytes for parameter in model_class().parameters())
    copies = 4 if optimizer_class is torch.optim.Adam else 2
    capacity_bytes = copies * parameter_bytes + {Mlp: 12_000, Cnn: 300_000, Gpt: 350_000}[model_class]
    monkeypatch.setenv("RAGTAG_EMULATE", cluster(tmp_path, f'[[device]]\nname = "box"\nmemory = "{capacity_bytes}B"\n'))
    with trainer_of(model_class, optimizer_class, 160) as trainer:
        (device,) = profile_of(trainer, tmp_path).devices
    assert device.capacity_bytes == capacity_bytes
    assert device.memory is not None
    per_sample = {False: device.memory.per_sample_bytes, True: device.memory.recompute_per_sample_bytes}
    assert per_sample[True] is not None
    assert per_sample[True] < per_sample[False]
    for recompute in (False, True):
        largest = (capacity_bytes - device.memory.fixed_bytes) // per_sample[recompute]
        assert 2 <= largest < 160, "within what was tried"
        for size in (largest, largest + 1):
            words = {"unit": size} if model_class is not Mlp else {"micro_batch": size}
            fits = size == largest
            with trainer_of(model_class, optimizer_class, 2 * (largest + 1), **words) as trainer:
                blocks, _ = find_blocks(trainer._run.model)
                refused = noting_refusals(trainer._run.memory, monkeypatch)
                with recomputing(blocks, active=recompute), nullcontext() if fits else suppress(RagtagError):
                    assert len(list(trainer.steps(2))) == 2
            assert bool(refused) == (not fits)


@pytest.mark.parametrize("model_class", [Mlp, Cnn, Gpt])
def test_measuring_leaves_the_run_as_it_was(model_class, tmp_path):
    def trained(measured):
        with trainer_of(model_class, torch.optim.Adam, 8) as trainer:
            drawn = torch.rand(1)
            if measured:
                torch.manual_seed(7)
                profile_of(trainer, tmp_path)
                assert all(parameter.grad is None for parameter in trainer._run.model.parameters())
                again = torch.rand(1)
                torch.manual_seed(7)
                assert torch.equal(again, torch.rand(1))
            losses = [step.loss for step in trainer.steps(3)]
            return drawn, losses, [tensor.clone() for tensor in trainer._run.model.state_dict().values()]

    (_, losses, values), (_, measured_losses, measured_values) = trained(False), trained(True)
    assert losses == measured_losses
    assert all(torch.equal(value, measured) for value, measured in zip(values, measured_values))


def test_blocks_cover_the_model(tmp_path):
    with trainer_of(Mlp, torch.optim.Adam, 16) as trainer:
        profile = profile_of(trainer, tmp_path)
    names = [block.name for block in profile.blocks]
    assert names[:4] == ["before the blocks", "blocks.0", "blocks.1", "blocks.2"]
    assert sum(block.parameter_bytes for block in profile.blocks) == profile.model.parameter_bytes
    timings = [timing.seconds / timing.samples for timing in profile.devices[0].timings]
    total_s = sum(block.forward_s + block.backward_s for block in profile.blocks)
    assert any(math.isclose(total_s, sample_s) for sample_s in timings)
    assert all(block.forward_s > 0 and block.backward_s > 0 for block in profile.blocks[1:4])
    # A block keeps its input and what Tanh and Sigmoid give: 64 numbers each; and hands on as many.
    assert [block.activation_bytes for block in profile.blocks[1:4]] == [3 * 4 * 64] * 3
    assert [block.output_bytes for block in profile.blocks[:4]] == [4 * 64] * 4
    assert profile.model.optimizer_bytes >= 2 * profile.model.parameter_bytes


def test_buckets_are_measured_in_the_order_in_which_they_travel(tmp_path):
    with trainer_of(Mlp, torch.optim.SGD, 16, bucket_bytes=20_000) as trainer:
        profile = profile_of(trainer, tmp_path)
        sizes = [bucket.flat.numel() for bucket in trainer._run.replica_sums().buckets]
    (device,) = profile.devices
    assert profile.model.bucket_bytes == tuple(4 * size for size in sizes)
    assert len(device.bucket_ready) == len(sizes) > 3
    assert list(device.bucket_ready) == sorted(device.bucket_ready)
    assert 0 < device.bucket_ready[0] < device.bucket_ready[-1] <= 1
    with trainer_of(Mlp, torch.optim.SGD, 16, bucket_bytes=20_000, wire="bf16") as trainer:
        rounded = profile_of(trainer, tmp_path).model
    assert rounded.bucket_bytes == tuple(2 * size for size in sizes), "as they travel"
    assert rounded.gradient_bytes == 4 * sum(sizes)


def test_what_was_measured_is_reused_until_it_is_old_or_another_model(tmp_path, monkeypatch):
    def measured(batch=16, model_class=Mlp, now_s=1.8e9):
        with trainer_of(model_class, torch.optim.SGD, batch) as trainer:
            profile = measure(trainer._run, tmp_path / "p.json", emulator=None, effort=QUICK, wall_clock=lambda: now_s)
        return any("Reused" in note for note in profile.devices[0].notes)

    assert not measured()
    assert measured()
    assert measured(now_s=1.8e9 + 29 * 86400)
    assert not measured(batch=12)
    assert not measured(model_class=Cnn)
    assert not measured(now_s=1.8e9 + 31 * 86400)
    monkeypatch.setenv("RAGTAG_PROFILE_FRESH", "1")
    assert not measured()


def rank_profiles(environ):
    os.environ.update(environ)
    try:
        with mock.patch.object(trainer_module, "measure", partial(measure, effort=QUICK)):
            trainer_of(Mlp, torch.optim.Adam, 16)
    except SystemExit as ended:
        return ended.code
    return "trained"


def test_two_ranks_measure_and_end_with_status_0(tmp_path):
    file = cluster(
        tmp_path,
        """
        [emulate]
        sample_ms = 4
        optimizer_ms = 6
        [[device]]
        name = "desk"
        [[device]]
        name = "shed"
        host = "garden"
        speed = 0.5
        memory = "600kB"
        [[link]]
        between = ["localhost", "garden"]
        bandwidth = "80Mbit/s"
        latency = "20ms"
        """,
    )
    environ = {"RAGTAG_EMULATE": file, "RAGTAG_PROFILE": str(tmp_path / "p.json")}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    assert run_ranks(2, rank_profiles, environ) == [0, 0]
    profile = load_profile(tmp_path / "p.json")
    desk, shed = profile.devices
    assert [(device.name, device.host) for device in profile.devices] == [("desk", "localhost"), ("shed", "garden")]
    assert (desk.capacity_bytes, shed.capacity_bytes) == (None, 600_000)
    # Emulated work takes what it should, or longer on a busy machine.
    for device, sample_s in ((desk, 0.004), (shed, 0.008)):
        last = device.timings[-1]
        assert 0.9 * sample_s <= last.seconds / last.samples
        assert device.optimizer_s >= 0.9 * 0.006
    (link,) = profile.links
    assert set(link.between) == {"localhost", "garden"}
    assert link.latency_s >= 0.0199
    assert link.bandwidth_bytes_per_s <= 1.1e7
    (num_bytes,) = profile.model.bucket_bytes
    assert num_bytes == profile.model.gradient_bytes
    assert all(0 < device.bucket_ready[0] <= 1 for device in profile.devices)
    # A vote crosses the link, which the prediction adds: for whoever takes part.
    assert shed.fixed_s < 0.0199


def test_a_device_that_is_too_small_ends_all_ranks_with_one_error(tmp_path):
    file = cluster(tmp_path, '[[device]]\nname = "desk"\n[[device]]\nname = "tiny"\nmemory = "60kB"\n')
    environ = {"RAGTAG_EMULATE": file, "RAGTAG_PROFILE": str(tmp_path / "p.json")}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    outcomes = run_ranks(2, rank_profiles, environ, expect_failures=True)
    assert not any(isinstance(outcome, RankDied) for outcome in outcomes)
    assert isinstance(outcomes[0], PeerError)
    assert "Device 'tiny' cannot train" in str(outcomes[0])
    assert type(outcomes[1]) is RagtagError
    assert "has 60 kB" in str(outcomes[1])
    assert not (tmp_path / "p.json").exists()
