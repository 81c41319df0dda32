"""Checkpoints written while training goes on are those of their step, and nobody waits for them."""

import time
from pathlib import Path

import pytest
import torch

import ragtag
from ragtag.checkpoint.directory import Directory
from tests.ranks import run_ranks
from tests.zero.models import Tokens
from tests.zero.test_zero_checkpoint import Rich, Seen, adam, assert_same, loss_fn

STEPS = 9
SLOW_S = 1.5


def make(layout, directory, **settings):
    torch.set_num_threads(1)
    model = Rich()
    return ragtag.Trainer(
        model,
        adam(model),
        loss_fn,
        Tokens(),
        global_batch_size=12,
        scheduler=lambda each: torch.optim.lr_scheduler.StepLR(each, 4, 0.5),
        state={"seen": Seen(), "marks": model.marks},
        config=ragtag.Config(
            layout=layout,
            checkpoint=str(directory),
            checkpoint_every_steps=4,
            checkpoint_every_s=None,
            micro_batch=3,
            **settings,
        ),
    )


def train(layout, directory, by_hand):
    """Checkpoints of steps 4 and 8, each of which takes long to write; and files of the same steps, saved by hand."""
    write, writing = Directory.save, []

    def slowly(self, mark, tree, **more):
        writing.append(mark.step)
        time.sleep(SLOW_S)
        write(self, mark, tree, **more)
        writing.remove(mark.step)

    Directory.save = slowly
    trainer = make(layout, directory, checkpoint_in_background=True)
    went_on = False
    for report in trainer.steps(STEPS):
        went_on = went_on or (report.number in (6, 7) and 4 in writing)
        if report.number in (4, 8):
            trainer.save(f"{by_hand}/{report.number}")
    trainer.close()
    return went_on


def files_in(directory):
    return sorted(Path(directory).glob("*step*"))


@pytest.mark.parametrize("layout", ["replicated", "zero3", "pipeline"])
def test_training_goes_on_while_a_checkpoint_of_its_step_is_written(layout, tmp_path):
    by_hand = tmp_path / "by-hand"
    by_hand.mkdir()
    results = run_ranks(2, train, layout, tmp_path / "kept", by_hand)
    assert results[0], "training waited for the writing"
    kept = files_in(tmp_path / "kept")
    assert len(kept) == 2
    for file, step in zip(kept, (4, 8)):
        # By hand it was saved inside of the loop's body, where the script's call of steps() is still open.
        assert_same(file, by_hand / str(step), without=("script", "history"))


def resume(layout, directory):
    trainer = make(layout, directory)
    numbers = [report.number for report in trainer.steps(STEPS)]
    trainer.close()
    return numbers


def test_a_run_goes_on_from_one_written_beside_it(tmp_path):
    (tmp_path / "by-hand").mkdir()
    run_ranks(2, train, "zero3", tmp_path / "kept", tmp_path / "by-hand")
    assert run_ranks(2, resume, "zero1", tmp_path / "kept") == [[9]] * 2


def fails_to_write(directory):
    def refuse(self, mark, tree, **more):
        raise ragtag.CheckpointError("the disk is full.")

    Directory.save = refuse
    trainer = make("zero3", directory, checkpoint_in_background=True)
    numbers = [report.number for report in trainer.steps(STEPS)]
    trainer.close()
    return numbers


def test_what_cannot_be_written_ends_nothing(tmp_path):
    assert run_ranks(2, fails_to_write, tmp_path / "kept") == [list(range(1, STEPS + 1))] * 2
