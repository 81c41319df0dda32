"""Save under one layout and number of ranks, go on under any other: the file is the same, and so is the training."""

import pytest
import torch
from torch import nn

import ragtag
from ragtag.checkpoint.file import load_file
from ragtag.checkpoint.tree import flatten
from tests.ranks import run_ranks, solo
from tests.zero.models import Tiny, Tokens, sum_loss

BATCH, SAVED_AT, STEPS = 12, 6, 10  # four steps an epoch
SLICES = {3: (7, 2, 1), 2: (1, 3)}
LAYOUTS = ("replicated", "zero1", "zero2", "zero3", "pipeline")


class Rich(Tiny):
    """Tied weights, a parameter without dimensions, frozen ones, some that no gradient reaches, and what is no
    parameter."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__(tied=True, unused=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.offset = nn.Parameter(torch.linspace(-1, 1, 17), requires_grad=False)
        self.marks = nn.Module()
        self.marks.register_buffer("center", torch.full((3,), 0.5))
        self.note = "from the start"
        self.double()

    def forward(self, tokens):
        return super().forward(tokens) * self.scale + self.offset

    def get_extra_state(self):
        return {"note": self.note, "numbers": torch.arange(3)}

    def set_extra_state(self, state):
        self.note = state["note"]


class Seen:
    """What a script keeps besides: no module, with tensors and numbers."""

    def __init__(self):
        self.value = {"counts": torch.zeros(5), "last": [0, None]}

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = dict(state)


def groups_of(model):
    """Two groups, the later parameters first."""
    parameters = dict(model.named_parameters())
    plain = [parameter for name, parameter in parameters.items() if parameter.dim() < 2]
    decayed = [parameter for name, parameter in parameters.items() if parameter.dim() >= 2]
    return [{"params": decayed[::-1], "weight_decay": 0.1}, {"params": plain, "lr": 1e-3}]


def adam(model):
    return torch.optim.AdamW(groups_of(model), lr=3e-3, weight_decay=0.0, amsgrad=True)


def loss_fn(model, batch):
    total, count = sum_loss(model, batch)
    return ragtag.Loss(total, count)


def make(layout="replicated", world_size=1, *, model=None, optimizer=adam, state=None, **settings):
    torch.set_num_threads(1)
    if model is None:
        model = Rich()
        state = {"seen": Seen(), "marks": model.marks}
    slices = SLICES.get(world_size) if layout.startswith("zero") else None
    return ragtag.Trainer(
        model,
        optimizer(model),
        loss_fn,
        Tokens(),
        global_batch_size=BATCH,
        shares=(7, 4, 1) if world_size == 3 and layout != "pipeline" else None,
        scheduler=lambda each: torch.optim.lr_scheduler.StepLR(each, 4, 0.5),
        state=state,
        config=ragtag.Config(layout=layout, slices=slices, micro_batch=3, **settings),
    )


def changed(trainer):
    """What is no parameter is changed by the script."""
    trainer._run.model.note = "changed"
    trainer._run.model.get_buffer("marks.center").fill_(1.5)
    trainer._run.state["seen"].value["counts"].fill_(1)
    return trainer


def save_in_mid_epoch(layout, world_size, path):
    trainer = changed(make(layout, world_size))
    for report in trainer.steps(STEPS):
        if report.number == SAVED_AT:
            trainer.save(path)
            break
    trainer.close()


def resume(layout, world_size, path, end):
    trainer = make(layout, world_size)
    trainer.load(path)
    assert trainer._run.model.note == "changed", "on every rank"
    assert trainer._run.model.get_buffer("marks.center").tolist() == [1.5] * 3
    assert trainer._run.state["seen"].value["counts"].tolist() == [1.0] * 5
    numbers = []
    for report in trainer.steps(STEPS):
        numbers.append(report.number)
        if report.number == STEPS:
            trainer.save(end)
    trainer.close()
    return numbers


def uninterrupted(folder):
    trainer = changed(make())
    for report in trainer.steps(STEPS):
        if report.number in (SAVED_AT, STEPS):
            trainer.save(f"{folder}/{report.number}")
    trainer.close()


def assert_same(path, reference, without=()):
    """All of two files: names, ties, numbers and texts exactly, and tensors."""
    (one, tensors), (other, expected) = (
        flatten({name: value for name, value in load_file(file).items() if name not in without})
        for file in (path, reference)
    )
    assert one == other
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.allclose(tensor, expected[name], rtol=1e-10, atol=1e-10), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Files of one process, in the middle and at the end."""
    folder = tmp_path_factory.mktemp("whole")
    solo(uninterrupted, folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What gives a file saved by three ranks under a layout."""
    folder = tmp_path_factory.mktemp("saved")

    def file(layout):
        if not (folder / layout).exists():
            run_ranks(3, save_in_mid_epoch, layout, 3, folder / layout)
        return folder / layout

    return file


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_file_is_the_same_under_any_layout(layout, saved, whole):
    assert_same(saved(layout), whole / str(SAVED_AT))


def go_on(saved, whole, tmp_path, before, after, world_size):
    results = run_ranks(world_size, resume, after, world_size, saved(before), tmp_path / "end")
    assert results == [list(range(SAVED_AT + 1, STEPS + 1))] * world_size
    assert_same(tmp_path / "end", whole / str(STEPS))


SOME = [
    ("replicated", "zero3", 2),
    ("zero3", "replicated", 1),
    ("zero3", "zero3", 2),
    ("zero1", "zero2", 3),
    ("zero2", "zero1", 2),
    ("pipeline", "zero3", 2),
    ("zero1", "pipeline", 2),
    ("pipeline", "pipeline", 2),
]


@pytest.mark.parametrize(("before", "after", "world_size"), SOME)
def test_the_same_training_under_another_layout(before, after, world_size, saved, whole, tmp_path):
    go_on(saved, whole, tmp_path, before, after, world_size)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_the_same_training_under_every_layout(before, after, world_size, saved, whole, tmp_path):
    go_on(saved, whole, tmp_path, before, after, world_size)
