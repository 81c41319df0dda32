"""Workers that hold slices and are killed while one of them writes a checkpoint, with real processes and a hub."""

import itertools
import signal
from pathlib import Path

import pytest
import torch

import ragtag
from ragtag.checkpoint.directory import Directory, newest_good
from ragtag.checkpoint.file import load_file
from ragtag.checkpoint.storage import LocalStorage
from tests.elastic import saving_cases as cases
from tests.elastic.crew import Crew, tell_step
from tests.ranks import solo
from tests.zero.models import Tokens, tiny
from tests.zero.test_zero_exact import adam, loss_fn

STEPS = 24


def keep(kept, layout, when, what, by_hand=False):
    """Train with a checkpoint after every other step; `by_hand`: and one more in the loop's body, after every third."""
    torch.set_num_threads(1)
    model, faults = tiny(), cases.Faults(kept, when, what)
    numbers, found = [], []
    with cases.moments(faults):
        trainer = faults.trainer = ragtag.Trainer(
            model,
            adam(model.parameters()),
            loss_fn,
            Tokens(),
            global_batch_size=12,
            config=ragtag.Config(
                layout=layout,
                patience_s=cases.PATIENCE_S,
                checkpoint=str(kept),
                checkpoint_every_steps=2,
                checkpoint_every_s=None,
                checkpoint_keep=2,
            ),
        )
        for report in trainer.steps(STEPS):
            numbers.append(report.number)
            if by_hand and report.number % 3 == 0:
                trainer.save(kept / "by-hand")
                found.append((report.number, load_file(kept / "by-hand")["committed"]))
            tell_step(report.number)
        sharding = trainer._run.sharding
        whole = dict(model.named_parameters()) if sharding is None else sharding.parameters()
        values = {name: value.detach().clone() for name, value in whole.items()}
        trainer.close()
    return numbers, values, found


def run(tmp_path: Path, layout: str, when: dict[int, str], what: str, by_hand: bool) -> list[list[tuple[int, int]]]:
    """Train with one worker killed for each of `when`, compare with one process, and return what the survivors' saves
    by hand held, each as (after which step, step in the file)."""
    kept = tmp_path / "kept"
    kept.mkdir()
    names = "abcdefgh"[: len(when) + 2]
    _, expected, _ = solo(keep, tmp_path / "alone", "replicated", {}, "")
    with Crew(tmp_path, expected=len(names), patience_s=cases.PATIENCE_S) as crew:
        for name in names:
            crew.start(name, keep, kept, layout, when, what, by_hand)
        results = crew.results(timeout=90.0)
    ended = [result for result in results.values() if isinstance(result, tuple)]
    assert [result for result in results.values() if not isinstance(result, tuple)] == [-signal.SIGKILL] * len(when)
    assert any(values for _, values, _ in ended), "rank 0 has all of them"
    for numbers, values, _ in ended:
        assert numbers[-1] == STEPS
        for before, after in itertools.pairwise(numbers):
            assert after == before + 1 or (after <= before and after % 2 == 1), "back to a checkpoint"
        for name, value in values.items():
            assert (value - expected[name]).abs().max() < 1e-9, name
    mark, tree = newest_good(Directory(LocalStorage(kept)))
    assert (mark.step, tree["committed"]) == (STEPS, STEPS)
    assert not [file.name for file in kept.iterdir() if file.name.endswith(".partial")]
    return [found for _, _, found in ended]


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_worker_is_killed_while_slices_are_written(tmp_path: Path, layout: str) -> None:
    what = "kill the writer" if layout == "zero1" else "kill another"
    run(tmp_path, layout, {6: "half written"}, what, by_hand=False)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("what", ["kill the writer", "kill another"])
def test_a_worker_is_killed_at_every_moment_of_keeping_slices(tmp_path: Path, what: str, layout: str) -> None:
    run(tmp_path, layout, dict(zip(range(4, 100, 4), cases.AUTOMATIC)), what, by_hand=False)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("what", ["kill the writer", "kill another"])
def test_a_worker_is_killed_at_every_moment_of_a_save_of_slices(tmp_path: Path, what: str, layout: str) -> None:
    when = dict(zip((3, 9, 15, 21), cases.BY_HAND))
    for found in run(tmp_path, layout, when, what, by_hand=True):
        assert all(held <= number for number, held in found)
        assert found[-1] == (STEPS, STEPS)
