"""Kinds of state that lie in slices, to the bit; what cannot be saved or loaded is the same error on every rank."""

import logging
import os
import resource
import signal
from functools import partial

import pytest
import safetensors.torch
import torch

import ragtag
from ragtag.checkpoint.directory import mark_of
from ragtag.checkpoint.file import load_file
from ragtag.checkpoint.tree import flatten
from ragtag.cli.export import run_export
from ragtag.runtime.stop_signals import Stopped
from tests.ranks import run_ranks, solo
from tests.zero.models import tiny
from tests.zero.test_zero_checkpoint import STEPS, Rich, adam, assert_same, changed, groups_of, make, uninterrupted

# ---- to the bit


def momentum(model):
    """A learning rate that is a tensor, and what keeps None for parameters without momentum so far."""
    return torch.optim.SGD(groups_of(model), lr=torch.tensor(0.05), momentum=0.9)


def in_half(model):
    return torch.optim.Adam(groups_of(model.bfloat16()), lr=1e-2)


KINDS = {"amsgrad": adam, "momentum": momentum, "half precision": in_half}


def save_again(layout, world_size, kind, path, again):
    """Load, and save what was loaded; without `path`, what there is after two steps."""
    trainer = make(layout, world_size, optimizer=KINDS[kind])
    if path is None:
        list(trainer.steps(2))
    else:
        trainer.load(path, replay=False)
    trainer.save(again)
    trainer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_is_saved_again_to_the_bit(kind, tmp_path):
    files = [tmp_path / name for name in ("first", "second", "third", "fourth")]
    run_ranks(3, save_again, "zero3", 3, kind, None, files[0])
    solo(save_again, "replicated", 1, kind, files[0], files[1])
    run_ranks(2, save_again, "zero1", 2, kind, files[1], files[2])
    run_ranks(3, save_again, "zero3", 3, kind, files[2], files[3])
    skeleton, tensors = flatten({**load_file(files[0]), "script": None})
    for file in files[1:]:
        other, others = flatten({**load_file(file), "script": None})
        assert (other, list(others)) == (skeleton, list(tensors))
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def part_of_the_model(layout, world_size, path, again=None):
    """A part of the model, with its parameters, is registered besides."""
    model = tiny()
    trainer = make(layout, world_size, model=model, state={"part": model.blocks[1]})
    if again is None:
        list(trainer.steps(2))
        trainer.save(path)
    else:
        trainer.load(path, replay=False)
        trainer.save(again)
    trainer.close()


def test_parameters_that_are_registered_besides_are_the_same_memory(tmp_path):
    files = [tmp_path / name for name in ("first", "second", "third")]
    run_ranks(2, part_of_the_model, "zero2", 2, files[0])
    solo(part_of_the_model, "replicated", 1, files[0], files[1])
    run_ranks(2, part_of_the_model, "zero1", 2, files[1], files[2])
    for file in files:
        tree = load_file(file)
        assert tree["state"]["part"]["mix.weight"] is tree["model"]["blocks.1.mix.weight"]
        assert_same(file, files[0], without=("script",))


def test_weights_are_exported_from_a_file_of_slices(tmp_path):
    run_ranks(3, save_again, "zero3", 3, "amsgrad", None, tmp_path / "saved.safetensors")
    run_export(str(tmp_path / "saved.safetensors"), tmp_path / "weights", as_json=True)
    weights, saved = safetensors.torch.load_file(tmp_path / "weights"), load_file(tmp_path / "saved.safetensors")
    assert torch.equal(weights["embed.weight"], weights["head.weight"])
    assert set(weights) == {name for name, value in Rich().state_dict().items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(value, saved["model"][name]) for name, value in weights.items())


# ---- checkpoints that keep themselves


def keep(layout, world_size, directory, full_at=None, stop_at=None):
    """Train with checkpoints after every other step; the disk is full for that of one step, and rank 1 is told to end
    after another."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ragtag").addHandler(handler)
    rank = int(os.environ.get("RANK", "0"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = changed(make(layout, world_size, checkpoint=directory, checkpoint_every_steps=2))
    numbers, status = [], 0
    try:
        for report in trainer.steps(STEPS):
            numbers.append(report.number)
            limit = 9000 if report.number == full_at and rank == 0 else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            if report.number == stop_at and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if report.number == STEPS:
                trainer.save(f"{directory}/end")
    except Stopped as stopped:
        status = stopped.code
    trainer.close()
    return numbers, status, said


def steps_in(directory):
    return sorted(mark.step for mark in map(mark_of, os.listdir(directory)) if mark is not None)


def test_checkpoints_under_layouts_stop_and_go_on(tmp_path):
    """A disk that is full in the middle of a tensor costs that checkpoint; what is written when all are told to end is
    what others go on from."""
    kept = run_ranks(3, keep, "zero3", 3, str(tmp_path), 4, 6)
    assert [(numbers, status) for numbers, status, _ in kept] == [([*range(1, 8)], 128 + signal.SIGTERM)] * 3
    [warning, stopped] = kept[0][2]
    assert warning.startswith(f"step 4: cannot write the checkpoint {tmp_path}/")
    assert "File too large" in warning
    assert "stopped by SIGTERM after step 7, which is saved" in stopped
    assert kept[1][2] == kept[2][2] == []
    assert steps_in(tmp_path) == [2, 6, 7]
    kept = run_ranks(2, keep, "zero1", 2, str(tmp_path), None, 8)
    assert [numbers for numbers, *_ in kept] == [[8, 9]] * 2
    assert steps_in(tmp_path) == [7, 8, 9]
    [(numbers, *_)] = run_ranks(1, keep, "replicated", 1, str(tmp_path))
    assert numbers == [10]
    solo(uninterrupted, tmp_path)
    assert_same(tmp_path / "end", tmp_path / str(STEPS), without=("history",))


# ---- refusals


def damaged(file, name):
    """A copy with a flipped bit, and a shorter one."""
    content = bytearray(file.read_bytes())
    content[-50] ^= 4
    (file.parent / f"{name}-flipped").write_bytes(content)
    (file.parent / f"{name}-shorter").write_bytes(content[:-9])


def refused(layout, folder):
    """What cannot be loaded or saved, and the run that goes on after it."""
    trainer = make(layout, 2)
    list(trainer.steps(1))
    said = []
    acts = [partial(trainer.load, f"{folder}/{name}") for name in ("absent", "own-flipped", "own-shorter", "other")]
    acts.append(partial(trainer.save, f"{folder}/other/x"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, act in enumerate([*acts, partial(trainer.save, f"{folder}/full")]):
        if number == len(acts) and trainer.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
        with pytest.raises(ragtag.CheckpointError) as caught:
            act()
        said.append((str(caught.value), caught.value.origin_rank))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    numbers = []
    for report in trainer.steps(STEPS - 1):
        numbers.append(report.number)
        if report.number == STEPS:
            trainer.save(f"{folder}/end-{layout}")
    trainer.close()
    return said, numbers


def other_model(path):
    trainer = make(model=tiny())
    trainer.save(path)
    trainer.close()


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_what_does_not_fit_is_the_same_error_on_every_rank(layout, tmp_path):
    solo(other_model, tmp_path / "other")
    solo(save_again, "replicated", 1, "amsgrad", None, tmp_path / "own")
    damaged(tmp_path / "own", "own")
    (first, numbers), (second, others) = run_ranks(2, refused, layout, tmp_path)
    assert first == second
    assert numbers == others == list(range(2, STEPS + 1))
    texts = [
        "there is no checkpoint file",
        "damaged: tensor",
        "cannot read",
        "of another model",
        "cannot write",
        "large",
    ]
    for (message, origin), text in zip(first, texts, strict=True):
        assert text in message
        assert origin == 0
    solo(uninterrupted, tmp_path)
    end, expected = load_file(tmp_path / f"end-{layout}"), load_file(tmp_path / str(STEPS))
    for name, tensor in flatten(expected["optimizer"])[1].items():
        assert torch.allclose(flatten(end["optimizer"])[1][name], tensor, rtol=1e-10, atol=1e-10), name


# ---- what only whole parameters could give


class Folding(torch.nn.Module):
    """Its `state_dict` holds something that it computes from parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens)

    def get_extra_state(self):
        return {"scaled": 2 * self.model.embed.weight.detach().abs().sum()}

    def set_extra_state(self, state):
        pass


def fold(layout, path):
    trainer = make(layout, 2, model=Folding(tiny()), state={})
    with pytest.raises(
        ragtag.CheckpointError, match=r"computes '_extra_state\.scaled' from parameters, which with layout"
    ):
        trainer.save(path)
    assert [report.number for report in trainer.steps(1)] == [1]
    trainer.close()


def test_what_is_computed_from_parameters_that_are_not_here_is_refused(tmp_path):
    run_ranks(2, fold, "zero3", tmp_path / "x")
