"""Save on three ranks in the middle of an epoch, go on with any number: the same training, every sample once."""

import os
from itertools import chain

import pytest
import torch
from tests.ranks import run_ranks, solo
from tests.runtime import cases
from tests.runtime.reference import worst_difference
from torch import nn
from torch.nn import functional

import ragtag
from ragtag.checkpoint.file import load_file, save_file
from ragtag.runtime.replicas import hashes

SIZE, BATCH, UNIT = 46, 10, 4  # five steps an epoch, the last one of six samples
SAVED_AT, STEPS = 7, 12


class Numbered(torch.utils.data.Dataset):
    """Images that know their index, with random augmentation."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(SIZE, 1, 4, 4, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 5, (SIZE,), generator=generator)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.images[index] + 0.1 * torch.randn(1, 4, 4, dtype=torch.float64), self.labels[index], index


class Statistics(nn.Module):
    """Running statistics that no state_dict holds: forward changes them all the same, and puts a new tensor there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.largest = 0.5 * self.largest + 0.5 * x.detach().abs().amax()
        return x * (1 + 0.01 * self.largest.clone())


def network():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), Statistics(),
        nn.Linear(64, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 5),
    ).double()  # fmt: skip


class Average(nn.Module):
    """An exponential moving average of parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = [model]
        for number, parameter in enumerate(model.parameters()):
            self.register_buffer(f"value_{number}", parameter.detach().clone())

    def update(self):
        for buffer, parameter in zip(self.buffers(), self.model[0].parameters()):
            buffer.lerp_(parameter.detach(), 0.1)


def schedule(optimizer):
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[4])


def train(path, *, until, load=False, save_at=None):
    """Train to step `until`; only rank 0's `path` exists."""
    rank = int(os.environ.get("RANK", "0"))
    path = path if rank == 0 else f"/nowhere/on/rank/{rank}"
    seen = {}

    def loss_fn(model, batch):
        seen.setdefault(number[0], []).extend(batch[2].tolist())
        return functional.cross_entropy(model(batch[0]), batch[1])

    number = [0]
    model = network()
    average = Average(model)
    trainer = ragtag.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        loss_fn,
        Numbered(),
        global_batch_size=BATCH,
        scheduler=schedule,
        state={"average": average, "statistics": model[4]},
        config=ragtag.Config(unit=UNIT, bucket_bytes=1024, check_replicas_every=2),
    )
    if load:
        trainer.load(path)
    number[0] = trainer._run.committed + 1
    lrs = []
    for report in trainer.steps(until):
        average.update()
        lrs.append(report.lr)
        number[0] = report.number + 1
        if report.number == save_at:
            trainer.save(path)
    seen.pop(0, None)  # the trial
    trainer.close()
    values = {**cases.values(model), "largest": model[4].largest.clone()}
    averages = {f"average {name}": value for name, value in cases.values(average).items()}
    return {**values, **averages}, seen, lrs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("state") / "saved")
    whole = solo(uninterrupted)
    return path, whole, run_ranks(3, save_in_mid_epoch, path)


def uninterrupted():
    return train("unused", until=STEPS)


def save_in_mid_epoch(path):
    return train(path, until=SAVED_AT + 1, save_at=SAVED_AT)


def resume(path):
    return train(path, until=STEPS, load=True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_training_on_any_number_of_ranks(saved, world_size):
    path, (values, _, lrs), before = saved
    after = run_ranks(world_size, resume, path)
    for resumed, _, late_lrs in after:
        assert worst_difference(resumed, values) < 1e-10
        assert all(torch.equal(value, after[0][0][name]) for name, value in resumed.items())
        assert late_lrs == lrs[SAVED_AT:]
    by_step = {
        step: sorted(chain(*(seen.get(step, []) for _, seen, _ in (before if step <= SAVED_AT else after))))
        for step in range(1, 11)
    }
    for epoch in range(2):
        assert sorted(chain(*(by_step[5 * epoch + step] for step in range(1, 6)))) == list(range(SIZE))


# ---- what does not fit is refused, and nothing has changed


def make(model=None, **options):
    model = model or cases.mlp()
    optimizer = options.pop("optimizer", cases.sgd)(model)
    return ragtag.Trainer(
        model, optimizer, cases.mean_squares, options.pop("dataset", cases.regression()),
        **{"global_batch_size": 8, "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2), **options},
    )  # fmt: skip


def by_dimension(flip):
    def optimizer(model):
        parameters = list(model.parameters())
        return torch.optim.SGD(parameters[::-1] if flip else parameters, lr=0.05, momentum=0.9)

    return optimizer


def other_model():
    torch.manual_seed(1)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 15), nn.GELU(), nn.Linear(15, 3)
    return nn.Sequential(*layers).double()


DIFFERENT = {
    "model": ({"model": other_model()}, r"of another model: '2.weight' is \(16, 16\).*\(15, 16\).* here"),
    "more": ({"model": nn.Sequential(*cases.mlp().children(), nn.Linear(3, 3).double())}, "it has no '5.weight'"),
    "dtype": (
        {"model": cases.mlp(torch.float32), "dataset": cases.regression(dtype=torch.float32)},
        r"torch\.float64 there, .* torch\.float32 here",
    ),
    "optimizer": ({"optimizer": cases.adam}, "saved with SGD, this run uses Adam"),
    "order of parameters": ({"optimizer": by_dimension(True)}, "in another order"),
    "seed": ({"seed": 1}, "saved with seed=0, this run has 1"),
    "batch": ({"global_batch_size": 9}, "saved with global_batch_size=8, this run has 9"),
    "shuffle": ({"shuffle": False}, "saved with shuffle=True"),
    "data": ({"dataset": cases.regression(22)}, "saved with dataset_size=23, this run has 22"),
    "precision": ({"precision": "bf16"}, "saved with precision='fp32'"),
    "unit": ({"config": ragtag.Config(unit=2)}, "saved with unit=1, this run has 2"),
    "scheduler": ({"scheduler": None}, "saved with a scheduler"),
    "state": ({"state": {"ema": nn.Linear(1, 1)}}, r"holds state of \[\], this run has \['ema'\]"),
}


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "plain"
    trainer = make()
    list(trainer.steps(3))
    trainer.save(path)
    return path


@pytest.mark.parametrize("difference", DIFFERENT)
def test_another_run_is_refused_by_name(plain_file, difference):
    changes, message = DIFFERENT[difference]
    trainer = make(**changes)
    list(trainer.steps(1))
    before = everything(trainer)
    with pytest.raises(ragtag.CheckpointError, match=message):
        trainer.load(plain_file)
    after = everything(trainer)
    assert str(after) == str(before)
    assert [report.number for report in trainer.steps(1)] == [2], "a refused load ends nothing"


def everything(trainer):
    run = trainer._run
    scheduler = None if run.scheduler is None else run.scheduler.state_dict()
    return [run.model.state_dict(), run.optimizer.state_dict(), scheduler, run.committed, trainer._script.state_dict()]


def test_state_that_does_not_take_what_was_saved_is_named(plain_file, tmp_path):
    tree = load_file(plain_file)
    tree["state"] = {"ema": {"weight": torch.ones(3)}}
    save_file(tmp_path / "odd", tree)
    with pytest.raises(
        ragtag.CheckpointError, match=r"(?s)state\['ema'\] did not take its state .* start the script again"
    ):
        make(state={"ema": nn.Linear(1, 1)}).load(tmp_path / "odd")


def refusals(paths):
    """On every rank the same error, and the run goes on after it."""
    trainer = make(config=ragtag.Config(patience_s=10.0))
    messages = []
    for path in paths:
        for act in (trainer.load, trainer.save) if "file-as-directory" in path else (trainer.load,):
            try:
                act(path)
            except ragtag.CheckpointError as error:
                messages.append((str(error), error.origin_rank))
        list(trainer.steps(1))
    values = cases.values(trainer._run.model)
    trainer.close()
    return messages, values


def test_a_file_that_rank_0_cannot_use_is_the_same_error_everywhere(plain_file, tmp_path):
    content = plain_file.read_bytes()
    (tmp_path / "truncated").write_bytes(content[:-100])
    middle = len(content) - 300
    (tmp_path / "flipped").write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    (tmp_path / "file-as-directory").write_bytes(b"")
    paths = [str(tmp_path / name) for name in ("missing", "truncated", "flipped", "file-as-directory/x")]
    (first, values), (second, others) = run_ranks(2, refusals, paths)
    assert first == second
    assert [origin for _, origin in first] == [0] * 5
    texts = ["there is no checkpoint file", "cannot read", "damaged", "there is no", "cannot write"]
    for (message, _), text in zip(first, texts):
        assert text in message
    reference = make()
    list(reference.steps(4))
    assert worst_difference(values, cases.values(reference._run.model)) < 1e-12
    assert all(torch.equal(value, others[name]) for name, value in values.items())


# ---- names and kinds of state


@pytest.mark.parametrize(("save_compiled", "load_compiled"), [(True, False), (False, True), (True, True)])
def test_compiling_is_not_part_of_what_is_saved(save_compiled, load_compiled, tmp_path):
    results = []
    for compiled in (save_compiled, load_compiled):
        model = bare = cases.mlp()
        if compiled:  # a part of it and the whole
            bare[2] = torch.compile(bare[2], backend="eager")
            model = torch.compile(bare, backend="eager")
        trainer = make(model)
        if results:
            trainer.load(tmp_path / "s")
            list(trainer.steps(3))
        list(trainer.steps(2 if results else 3))
        if not results:
            trainer.save(tmp_path / "s")
            list(trainer.steps(2))
        results.append([value.clone() for value in bare.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


class Wrapped(nn.Module):
    """Names as `torch.compile` makes them, without the seconds that importing the compiler takes in each rank."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, x):
        return self._orig_mod(x)


def half_compiled():
    """Whether a rank compiles is its own business."""
    model = cases.mlp()
    rank = int(os.environ.get("RANK", "0"))
    trained = Wrapped(model) if rank == 1 else model
    trainer = make(trained, config=ragtag.Config(check_replicas_every=1))
    list(trainer.steps(3))
    trainer.close()
    return cases.values(model)


def test_one_rank_may_compile():
    values = run_ranks(2, half_compiled)
    reference = make()
    list(reference.steps(3))
    for own in values:
        assert worst_difference(own, cases.values(reference._run.model)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_hashes_of_replicas_see_one_bit_and_other_constants(dtype):
    rows = ([0, 0, 0, 0], [1, 1, 1, 1], [[1, 0], [0, 0]], [], 1, [1, 0, 0, 0])
    tensors = [torch.tensor(row).to(dtype) for row in rows]
    found = hashes([(str(index), tensor) for index, tensor in enumerate(tensors)])
    assert len({found[0], found[1], found[5]}) == 3
    assert found[0] == hashes([("again", torch.zeros(4, dtype=dtype))])[0]


def test_an_average_that_is_no_module_and_further_values(tmp_path):
    class Plain:
        def __init__(self):
            self.value = {"list": [torch.ones(2), 3, "text", None], "tuple": (1.5, True)}

        def state_dict(self):
            return self.value

        def load_state_dict(self, state):
            self.value = dict(state)

    kept = Plain()
    trainer = make(state={"kept": kept})
    kept.value["list"][1] = 4
    list(trainer.steps(1))
    trainer.save(tmp_path / "s")
    other = Plain()
    make(state={"kept": other}).load(tmp_path / "s")
    assert str(other.value) == str(kept.value)
