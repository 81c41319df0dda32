"""Checkpoints of runs whose writer, or another worker, is killed or frozen at any moment of writing one."""

import os
import resource
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import ragtag
from ragtag.checkpoint.directory import Directory, mark_of, newest_good
from ragtag.checkpoint.file import load_file
from ragtag.checkpoint.storage import LocalStorage
from ragtag.cli.hub_question import ask
from tests.elastic import saving_cases as cases
from tests.elastic.crew import Crew, tell_step
from tests.ranks import solo

pytestmark = pytest.mark.usefixtures("one_thread")


def same(values: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-9)


def seen_at(directory: Path, step: int) -> list[int]:
    """Steps of the checkpoints that a reader would have found at the fault after this step, each of them whole."""
    files = [file for file in (directory / f"seen-{step}").iterdir() if file.name.endswith(".safetensors")]
    return sorted(load_file(file)["committed"] for file in files if not file.name.startswith("."))


def nothing_half_written(kept: Path) -> None:
    assert not [file.name for file in kept.iterdir() if file.name.endswith(".partial")]


# Killed


@pytest.mark.parametrize("what", ["kill the writer", pytest.param("kill another", marks=pytest.mark.long)])
def test_a_worker_is_killed_at_every_moment_of_a_save(tmp_path: Path, what: str) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    when = dict(zip(range(4, 100, 4), cases.BY_HAND))
    expected = solo(cases.save_by_hand, tmp_path, {}, "")
    names = "abcdef"[: len(when) + 2]
    with Crew(tmp_path, expected=len(names), patience_s=cases.PATIENCE_S) as crew:
        for name in names:
            crew.start(name, cases.save_by_hand, kept, when, what)
        results = crew.results(timeout=60.0)
    assert [result for result in results.values() if not isinstance(result, dict)] == [-signal.SIGKILL] * len(when)
    for result in results.values():
        if isinstance(result, dict):
            assert result["numbers"] == expected["numbers"]
            same(result["values"], expected["values"])
            assert result["found"] == [*range(2, cases.STEPS + 1, 2)], "each save that returns is there"
    for step, moment in when.items():
        assert seen_at(tmp_path, step) == [step if moment == "renamed" else step - 2], (step, moment)
    nothing_half_written(kept)


@pytest.mark.parametrize("what", ["kill the writer", pytest.param("kill another", marks=pytest.mark.long)])
def test_a_worker_is_killed_at_every_moment_of_keeping(tmp_path: Path, what: str) -> None:
    kept = tmp_path / "kept"
    when = dict(zip(range(6, 100, 2), cases.AUTOMATIC))
    expected = solo(cases.keep, tmp_path / "alone", {}, "")
    names = "abcdefgh"[: len(when) + 2]
    with Crew(tmp_path, expected=len(names), patience_s=cases.PATIENCE_S) as crew:
        for name in names:
            crew.start(name, cases.keep, kept, when, what)
        results = crew.results(timeout=60.0)
    assert [result for result in results.values() if not isinstance(result, dict)] == [-signal.SIGKILL] * len(when)
    for result in results.values():
        if isinstance(result, dict):
            assert result["numbers"] == expected["numbers"]
            same(result["values"], expected["values"])
    whole = 4
    for step, moment in when.items():
        there = moment in ("renamed", "pointed", "removing")
        assert seen_at(tmp_path, step)[-1] == (step if there else whole), (step, moment)
        # Where a writer is killed, that checkpoint is not written again: the next one is.
        whole = step if there or what == "kill another" else whole
    directory = Directory(LocalStorage(kept))
    mark, tree = newest_good(directory)
    assert (mark.step, tree["committed"]) == (cases.STEPS, cases.STEPS)
    assert directory.pointer() == mark
    assert len([file for file in kept.iterdir() if mark_of(file.name)]) == 2
    nothing_half_written(kept)


# Frozen


@pytest.mark.parametrize(
    ("function", "moment"),
    [
        pytest.param(cases.save_by_hand, "half written", marks=pytest.mark.long),
        (cases.save_by_hand, "written"),
        pytest.param(cases.keep, "written", marks=pytest.mark.long),
        (cases.keep, "renamed"),
    ],
)
def test_a_writer_that_was_frozen_replaces_nothing_newer(tmp_path: Path, function: Any, moment: str) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    with Crew(tmp_path, expected=3, patience_s=cases.PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, function, kept, {4: moment}, "freeze the writer", 0.1, 10)
        end_s = time.monotonic() + 30
        while not (frozen := list(tmp_path.glob("frozen-*"))):
            assert time.monotonic() < end_s
            time.sleep(0.01)
        frozen_name = frozen[0].name.removeprefix("frozen-")
        others = [name for name in "abc" if name != frozen_name]
        crew.wait_for_step(10, *others)
        before = newest(kept)
        crew.signal(frozen_name, signal.SIGCONT)
        woken = crew.results(frozen_name)[frozen_name]
        assert "was given up and the others went on without it" in str(woken), woken
        assert newest(kept) >= before >= 8
        results = crew.results(*others)
    expected = solo(function, tmp_path / "alone", {}, "") if function is cases.keep else None
    for result in results.values():
        assert isinstance(result, dict), result
        assert result["numbers"][-1] == cases.STEPS
        if expected is not None:
            same(result["values"], expected["values"])
    assert newest(kept) == cases.STEPS
    nothing_half_written(kept)


def newest(kept: Path) -> int:
    """The step of what a reader finds; of a directory, where its pointer is."""
    if (kept / "state.safetensors").exists():
        return load_file(kept / "state.safetensors")["committed"]
    pointer = Directory(LocalStorage(kept)).pointer()
    assert pointer is not None
    return pointer.step


# Started again, with others


def train_with(kept: Path, steps: int, how: str) -> Any:
    """Train up to `steps`; `how` the state of step 7 comes to `kept` or from there: saved or loaded by hand, or by
    itself."""
    model, computed = cases.model_of(), []

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if trainer is not None:
            computed.extend((trainer._run.committed + 1, int(index)) for index in batch[2])
        return cases.loss_fn(model, batch)

    trainer = None
    settings = {"checkpoint": str(kept), "checkpoint_every_steps": 7} if how == "automatic" else {}
    trainer = cases.trainer_of(model, loss_fn, **settings)
    if how == "load":
        trainer.load(kept / "state.safetensors")
    numbers = []
    for report in trainer.steps(steps):
        numbers.append(report.number)
        if how == "save" and report.number == 7:
            trainer.save(kept / "state.safetensors")
    trainer.close()
    return {"numbers": numbers, "values": cases.values_of(model), "computed": computed}


def crew_trains(directory: Path, names: str, kept: Path, steps: int, how: str) -> list[Any]:
    directory.mkdir()
    with Crew(directory, expected=len(names), patience_s=cases.PATIENCE_S) as crew:
        for name in names:
            crew.start(name, train_with, kept, steps, how)
        results = list(crew.results().values())
    assert all(isinstance(result, dict) for result in results), results
    return results


@pytest.mark.parametrize(
    ("saves", "goes_on"), [pytest.param("save", "load", marks=pytest.mark.long), ("automatic", "automatic")]
)
def test_a_run_of_three_goes_on_as_two_and_as_five(tmp_path: Path, saves: str, goes_on: str) -> None:
    kept, saved = tmp_path / "kept", tmp_path / "saved"
    kept.mkdir()
    expected = solo(train_with, kept, cases.STEPS, "")
    computed = [
        pair for result in crew_trains(tmp_path / "three", "abc", kept, 7, saves) for pair in result["computed"]
    ]
    shutil.copytree(kept, saved)
    for directory, names in (("two", "ab"), ("five", "abcde")):
        shutil.rmtree(kept)
        shutil.copytree(saved, kept)
        results = crew_trains(tmp_path / directory, names, kept, cases.STEPS, goes_on)
        for result in results:
            assert result["numbers"] == [*range(8, cases.STEPS + 1)]
            same(result["values"], expected["values"])
        both = sorted(computed + [pair for result in results for pair in result["computed"]])
        assert both == sorted(expected["computed"]), "each step has its samples, whoever computed them"
        indices = [index for _, index in expected["computed"]]
        epoch = len(cases.DATA)
        for start in range(0, len(indices), epoch):
            assert max(Counter(indices[start : start + epoch]).values()) == 1, "every index once an epoch"


# On one machine only, damaged, of another model, and no room


def look_on_own_disk() -> Any:
    """Each worker has a disk of its own."""
    own = Path(os.environ["CREW_DIRECTORY"], os.environ["RAGTAG_WORKER"])
    own.mkdir(exist_ok=True)
    os.chdir(own)
    model, said = cases.model_of(), cases.warnings_of_ragtag()
    trainer = cases.trainer_of(model, checkpoint="kept")
    rank, began_at = trainer.rank, trainer._run.committed
    refused = ""
    try:
        trainer.load("by-hand.safetensors")
    except ragtag.CheckpointError as error:
        refused = str(error)
    loaded = trainer._run.committed
    for report in trainer.steps(cases.STEPS):
        tell_step(report.number)
    generation = report.generation
    trainer.close()
    return {
        "rank": rank,
        "began_at": began_at,
        "loaded": loaded,
        "refused": refused,
        "said": "\n".join(said),
        "values": cases.values_of(model),
        "generation": generation,
    }


def make_kept(directory: Path) -> None:
    """What a run by itself has kept, of steps 4 and 8, and a file by hand of step 6."""
    directory.mkdir(parents=True)
    trainer = cases.trainer_of(cases.model_of(), checkpoint=str(directory / "kept"), checkpoint_every_steps=4)
    for report in trainer.steps(8):
        if report.number == 6:
            trainer.save(directory / "by-hand.safetensors")
    trainer.close()


def go_on_in(tmp_path: Path) -> dict[str, Any]:
    with Crew(tmp_path, expected=3, patience_s=cases.PATIENCE_S) as crew:
        crew.start("a", look_on_own_disk)
        while not ask(f"127.0.0.1:{crew.port}", crew.token, timeout_s=5.0).connected:
            time.sleep(0.01)  # on one machine the first that comes is rank 0
        for name in "bc":
            crew.start(name, look_on_own_disk)
        results = crew.results()
    assert all(isinstance(result, dict) for result in results.values()), results
    assert len({result["generation"] for result in results.values()}) == 1
    assert results["a"]["generation"] % 1_000_000 == 1, "nobody was given up"
    return results


def test_files_that_lie_on_one_machine_only(tmp_path: Path) -> None:
    expected = solo(train_with, tmp_path, cases.STEPS, "")
    solo(make_kept, tmp_path / "c")
    results = go_on_in(tmp_path)
    assert (results["a"]["rank"], results["c"]["rank"] != 0) == (0, True)
    for result in results.values():
        assert (result["began_at"], result["loaded"], result["refused"]) == (8, 6, "")
        same(result["values"], expected["values"])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_damaged_files_are_refused_by_name_and_the_one_before_is_used(tmp_path: Path, damage: Any) -> None:
    expected = solo(train_with, tmp_path, cases.STEPS, "")
    solo(make_kept, tmp_path / "b")
    damage(tmp_path / "b" / "by-hand.safetensors")
    (last,) = [file for file in (tmp_path / "b" / "kept").iterdir() if (mark := mark_of(file.name)) and mark.step == 8]
    damage(last)
    results = go_on_in(tmp_path)
    for result in results.values():
        assert (result["began_at"], result["loaded"]) == (4, 4)
        assert "by-hand.safetensors" in result["refused"]
        assert "damaged" in result["refused"]
        same(result["values"], expected["values"])
    assert last.name in results["b"]["said"]
    assert "Looking for another one" in results["b"]["said"]


def load_another(kept: Path) -> Any:
    """A file of another model is refused, and training goes on."""
    model = cases.model_of()
    trainer = cases.trainer_of(model)
    refused, generations = "", set()
    for report in trainer.steps(cases.STEPS):
        generations.add(report.generation)
        if report.number == 5:
            try:
                trainer.load(kept)
            except ragtag.CheckpointError as error:
                refused = str(error)
    trainer.close()
    return refused, cases.values_of(model), len(generations)


def test_a_file_of_another_model_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    def make() -> None:
        trainer = cases.trainer_of(torch.nn.Linear(6, 3).double())
        trainer.save(tmp_path / "another.safetensors")
        trainer.close()

    solo(make)
    expected = solo(train_with, tmp_path, cases.STEPS, "")
    with Crew(tmp_path, expected=3, patience_s=cases.PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, load_another, tmp_path / "another.safetensors")
        for refused, values, generations in crew.results().values():
            assert "another.safetensors is of another model" in refused
            assert generations == 1
            same(values, expected["values"])


def keep_on_a_full_disk(kept: Path) -> Any:
    """From step 8 to 15 no file may grow beyond a few bytes, as on a full disk."""
    model, said = cases.model_of(), cases.warnings_of_ragtag()
    trainer = cases.trainer_of(model, checkpoint=str(kept), checkpoint_every_steps=4)
    refused, generations = "", set()
    for report in trainer.steps(cases.STEPS):
        generations.add(report.generation)
        if report.number in (7, 15):
            room = 100 if report.number == 7 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        if report.number == 10:
            try:
                trainer.save(kept / "by-hand.safetensors")
            except ragtag.CheckpointError as error:
                refused = str(error)
    trainer.close()
    return refused, cases.values_of(model), len(generations), said


def test_a_full_disk_costs_the_checkpoint_and_nobody(tmp_path: Path) -> None:
    expected = solo(train_with, tmp_path, cases.STEPS, "")
    kept = tmp_path / "kept"
    with Crew(tmp_path, expected=3, patience_s=cases.PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, keep_on_a_full_disk, kept)
        warned = []
        for refused, values, generations, said in crew.results().values():
            warned += said
            assert "cannot write the checkpoint" in refused
            assert "by-hand.safetensors" in refused
            assert "File too large" in refused
            assert generations == 1
            same(values, expected["values"])
    assert len(warned) == 2, "of steps 8 and 12, by the one that writes"
    assert all("File too large" in text and "Training goes on without this checkpoint" in text for text in warned)
    steps = sorted(mark.step for file in kept.iterdir() if (mark := mark_of(file.name)))
    assert steps == [16, 20, 24], "those after there was room again"
    nothing_half_written(kept)
