"""Runs that lose and gain workers at the worst places end with the parameters of a run in which nothing happened."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ragtag
from ragtag.core.errors import PeerLost, SettingError
from tests.elastic.crew import Crew, tell_step
from tests.elastic.hostile_cases import (
    PATIENCE_S,
    SINK,
    Case,
    Data,
    Fault,
    cross_entropy,
    network,
    places,
    same,
    sample,
    train,
    trainer_of,
)
from tests.ranks import join, run_ranks, solo

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def crew_of(directory: Path, names: str, function: Any, *args: Any, patience_s: float = PATIENCE_S) -> Iterator[Crew]:
    with Crew(directory, expected=len(names), patience_s=patience_s) as crew:
        for name in names:
            crew.start(name, function, *args)
        yield crew


def wait_for(file: Path, timeout: float = 60.0) -> None:
    end_s = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < end_s, f"no {file.name}"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [7, 8], ids=["applied", "skipped"])
def test_one_worker_has_applied_a_step_that_another_only_holds(tmp_path: Path, number: int) -> None:
    kill = Fault(name="c", place="before apply", nth=number)
    tear = Fault(name="b", place="after voting", nth=number, act="tear")
    case = Case(steps=12, faults=(kill, tear), **SINK)
    reference = solo(train, case)
    assert bool(reference["reports"][number - 1][3]) == (number == 8)
    with crew_of(tmp_path, "abc", train, case) as crew:
        results = crew.results()
        assert results["c"] == -signal.SIGKILL
        for name in "ab":
            same(results[name], reference)
        assert "before late apply" in results["b"]["been"]
        assert "before late apply" not in results["a"]["been"]


def test_newcomers_are_lost_while_they_copy_and_a_veteran_right_after(tmp_path: Path) -> None:
    """`b` is lost in the first step after `e` has come, before `e` has applied anything."""
    steps = 60
    faults = (
        Fault(name="d", place="before broadcast"),
        Fault(name="b", place="after brought", nth=2),
        Fault(name="e", place="before sums of step N", act="sleep", seconds=0.3),
    )
    case = Case(steps=steps, pause_s=0.15, until="e", faults=faults, by_unit=True)
    reference = solo(train, Case(steps=steps, by_unit=True))
    with crew_of(tmp_path, "abc", train, case) as crew:
        crew.wait_for_step(3, "a")
        crew.start("d", train, case)
        crew.start("e", train, case)
        results = crew.results()
        assert results["d"] == results["b"] == -signal.SIGKILL
        for name in "ac":
            same(results[name], reference)
        same(results["e"], reference, first=results["e"]["reports"][0][0])
        assert results["a"]["reports"][-1][4] == 3


def test_a_veteran_is_lost_before_a_newcomer_has_applied_a_step(tmp_path: Path) -> None:
    steps = 60
    case = Case(steps=steps, pause_s=0.15, until="c", faults=(Fault(name="b", place="before sums of step N"),))
    reference = solo(train, Case(steps=steps))
    with crew_of(tmp_path, "ab", train, case) as crew:
        crew.wait_for_step(3, "a")
        crew.start("c", train, case)
        results = crew.results()
        assert results["b"] == -signal.SIGKILL
        same(results["a"], reference)
        same(results["c"], reference, first=results["c"]["reports"][0][0])


def differently(case: Case) -> Any:
    if os.environ["RAGTAG_WORKER"] != "c":
        return train(case)
    try:
        return train(Case(steps=case.steps, optimizer="SGD"))
    finally:
        Path(os.environ["CREW_DIRECTORY"], "refused.step").touch()


def test_who_was_started_differently_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    steps = 60
    reference = solo(train, Case(steps=steps))
    with crew_of(tmp_path, "ab", differently, Case(steps=steps, pause_s=0.15, until="refused")) as crew:
        crew.wait_for_step(3, "a")
        crew.start("c", differently, Case(steps=steps))
        results = crew.results()
        assert "was started differently" in str(results["c"]), results["c"]
        assert results["c"].origin_rank is None, "nobody else prints it"
        for name in "ab":
            same(results[name], reference)


class Script:
    """A script with everything that all ranks do together besides steps; it waits for `wanted` workers before and
    after a state is loaded."""

    def __init__(self, directory: Path, faults: tuple[Fault, ...] = (), wanted: tuple[int, int] = (0, 0)) -> None:
        self.directory, self.faults, self.wanted = directory, faults, wanted

    def __call__(self) -> Any:
        model, done = network(False), []

        def train(num_steps: int, wanted: int) -> None:
            for report in trainer.steps(num_steps):
                done.append((report.number, report.loss))
                tell_step(len(done) if report.number < 5 else report.number)
                time.sleep(0.25 if len(report.shares) < wanted else 0.0)

        with places(self.faults) as here:
            trainer = trainer_of(model, torch.optim.AdamW)
            done.append(("before", float(trainer.evaluate(Data(False), cross_entropy))))
            trainer.save(self.directory / "first.safetensors")
            for _ in range(4):
                train(20 if self.wanted[0] else 4, self.wanted[0])
                done.append(("score", float(trainer.evaluate(Data(False), cross_entropy))))
                here.at("evaluated")
                trainer.save(self.directory / "last.safetensors")
                here.at("saved")
                with suppress(ragtag.CheckpointError):
                    trainer.save(self.directory / "nowhere" / "file" / "last.safetensors")
                    done.append(("not refused", 0.0))
                here.at("refused")
            trainer.load(self.directory / "first.safetensors")
            (self.directory / "loaded").touch()
            here.at("loaded")
            train(80 if self.wanted[1] else 4, self.wanted[1])
            trainer.close()
        return {"done": done, "values": [p.detach().clone() for p in model.parameters()]}


def test_calls_that_only_some_had_finished_when_a_worker_was_lost(tmp_path: Path) -> None:
    """In each of four calls a worker is lost when all but `b` have finished it."""
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "file").write_text("no directory")
    faults = (
        Fault(name="c", place="evaluated", nth=1),
        Fault(name="b", place="before wait evaluating", nth=2, act="tear"),
        Fault(name="d", place="saved", nth=2),
        Fault(name="b", place="after save", nth=4, act="tear"),
        Fault(name="e", place="refused", nth=3),
        Fault(name="b", place="after save", nth=7, act="tear"),
        Fault(name="f", place="loaded", nth=1),
        Fault(name="b", place="after loading", nth=1, act="tear"),
    )
    reference = solo(Script(tmp_path))
    with crew_of(tmp_path, "abcdef", Script(tmp_path, faults)) as crew:
        results = crew.results(timeout=90.0)
        assert [results[name] for name in "cdef"] == [-signal.SIGKILL] * 4, results
        for name in "ab":
            assert isinstance(results[name], dict), results
            assert [what for what, _ in results[name]["done"]] == [what for what, _ in reference["done"]]
            assert [n for _, n in results[name]["done"]] == pytest.approx([n for _, n in reference["done"]], abs=1e-9)


def test_a_newcomers_script_passes_what_the_others_have_behind_them(tmp_path: Path) -> None:
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "file").write_text("no directory")
    script = Script(tmp_path, wanted=(3, 4))
    reference = solo(Script(tmp_path, wanted=(1, 1)))
    (tmp_path / "loaded").unlink()
    with crew_of(tmp_path, "ab", script) as crew:
        crew.wait_for_step(22, "a")
        crew.start("c", script)
        wait_for(tmp_path / "loaded")
        crew.start("d", script)
        for name, result in crew.results(timeout=60.0).items():
            assert isinstance(result, dict), (name, result)
            mine, expected = ([pair for pair in who["done"] if pair[0] != "not refused"] for who in (result, reference))
            assert (len(mine) < len(expected)) == (name in "cd")
            # What a newcomer did not see is not done again, but for evaluations, which give what they gave.
            joined = [isinstance(what, int) for what, _ in mine].index(True)
            seen_before = [pair for pair in expected[: len(expected) - len(mine) + joined] if isinstance(pair[0], str)]
            for (what, number), (should, value) in zip(
                mine, [*seen_before, *expected[joined - len(mine) :]], strict=True
            ):
                assert what == should
                assert number == pytest.approx(value, abs=1e-9)
            for one, other in zip(result["values"], reference["values"]):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


class Greedy:
    """On worker `b` more than two samples in one micro-batch are too many, in its "forward" or only in its
    "backward"."""

    def __init__(self, phase: str) -> None:
        self.failures: list[int] = []
        self.phase = phase

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        fails = os.environ.get("RAGTAG_WORKER") == "b" and len(batch[0]) > 2 and self.counting
        if fails and torch.is_grad_enabled() and self.phase == "forward":
            self.fail()
        loss = cross_entropy(model, batch)
        if fails and loss.requires_grad and self.phase == "backward":
            loss.register_hook(self.fail)
        return loss

    counting = False

    def fail(self, *_: Any) -> None:
        self.failures.append(self.number())
        raise torch.OutOfMemoryError("no more")

    def number(self) -> int:
        return 0


def train_in_little_memory(case: Case, phase: str = "") -> Any:
    loss = Greedy(phase)
    model = network(False)
    with places(case.faults):
        trainer = trainer_of(model, loss_fn=loss, shares=case.arguments.get("shares"))
        loss.number = lambda: trainer._run.committed + 1
        loss.counting = True
        sizes, decisions = [], []
        for _ in trainer.steps(case.steps):
            sizes.append((trainer.world_size, trainer.plan.shares, trainer.plan.micro_batch))
            decisions.append(len(trainer.decisions))
        trainer.close()
    return {
        "values": [p.detach().clone() for p in model.parameters()],
        "failures": loss.failures,
        "sizes": sizes,
        "decisions": decisions,
        "name": os.environ.get("RAGTAG_WORKER"),
    }


@pytest.mark.parametrize(
    ("shares", "phase"),
    [(None, "forward"), ((6, 5, 5), "forward"), (None, "backward")],
    ids=["followed", "pinned", "only backward"],
)
def test_what_memory_was_found_to_hold_is_known_after_a_worker_was_lost(
    tmp_path: Path, shares: Any, phase: str
) -> None:
    case = Case(steps=10, faults=(Fault(name="c", place="before apply", nth=6),), arguments={"shares": shares})
    reference = solo(train_in_little_memory, Case(steps=10))
    with crew_of(tmp_path, "abc", train_in_little_memory, case, phase) as crew:
        results = crew.results()
        for name in "ab":
            for one, other in zip(results[name]["values"], reference["values"]):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
            decisions = results[name]["decisions"]
            assert decisions == sorted(decisions), "earlier decisions are not forgotten"
        failures, sizes = results["b"]["failures"], results["b"]["sizes"]
        assert failures
        assert max(failures) < 6, "what did not fit is tried again"
        assert sizes[-1][0] == 2
        if shares is not None:
            before, after = sizes[0][1], sizes[-1][1]
            rank = before.index(min(before))
            assert sorted(before) == sorted(shares)
            assert sum(after) == 16
            assert max(after) < 16, (before, after, rank)


def train_and_freeze(case: Case) -> Any:
    model = network(True)
    with places(case.faults):
        trainer = trainer_of(model, torch.optim.AdamW, shuffle=False, settings={"unit": 4})
        first = None
        for report in trainer.steps(case.steps):
            first = first or report.number
            tell_step(report.number)
            if report.number == 4:
                model[0].requires_grad_(False)
                model[1].eval()
                trainer._run.optimizer.param_groups[0]["lr"] = 0.01
            case.pause()
        trainer.close()
    return {"values": [t.detach().clone() for t in (*model.parameters(), *model.buffers())], "first": first}


def test_a_newcomer_freezes_what_the_others_have_frozen(tmp_path: Path) -> None:
    case = Case(steps=60, pause_s=0.15, until="c")
    reference = solo(train_and_freeze, Case(steps=60))
    with crew_of(tmp_path, "ab", train_and_freeze, case) as crew:
        crew.wait_for_step(6, "a")
        crew.start("c", train_and_freeze, case)
        results = crew.results()
        assert results["c"]["first"] > 6
        for result in results.values():
            for one, other in zip(result["values"], reference["values"]):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


class Stalling:
    """Takes 2 ms a sample; on `b`, once a file says that a newcomer is on its way, until that one may join."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run: Any = None

    def __len__(self) -> int:
        return len(Data(False))

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        run = self.run
        if run is not None and run.committed > 8 and (self.directory / "coming").exists():
            self.run, end_s = None, time.monotonic() + 20.0
            (self.directory / "stalled").touch()
            while time.monotonic() < end_s and not any(ballot.regroup for ballot in run.in_hand.ballots):
                time.sleep(0.005)
            (self.directory / f"behind {run.in_hand.number - run.committed}").touch()
        return sample(index)


def train_and_stall(directory: Path, until: int) -> Any:
    model, data, name = network(False), Stalling(directory), os.environ.get("RAGTAG_WORKER", "")

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.003 * len(batch[0]))
        return cross_entropy(model, batch)

    if name == "d":
        (directory / "coming").touch()
        end_s = time.monotonic() + 20.0
        while not (directory / "stalled").exists() and time.monotonic() < end_s:
            time.sleep(0.005)
    trainer = trainer_of(model, torch.optim.AdamW, loss_fn, data, patience_s=10.0)
    data.run = trainer._run if name == "b" else None
    numbers = []
    for report in trainer.steps(200 if until else 1):
        numbers.append(report.number)
        tell_step(report.number)
        if until and len(report.shares) == until:
            break
    for report in trainer.steps(4):
        numbers.append(report.number)
    trainer.close()
    return numbers, [p.detach().clone() for p in model.parameters()]


def test_newcomers_join_while_a_stand_in_acts_for_a_stalled_worker(tmp_path: Path) -> None:
    """Steps that were settled for it are applied before it leaves the generation."""
    with crew_of(tmp_path, "abc", train_and_stall, tmp_path, 4, patience_s=10.0) as crew:
        crew.wait_for_step(8, "a")
        crew.start("d", train_and_stall, tmp_path, 4)
        results = crew.results(timeout=60.0)
        assert all(isinstance(result, tuple) for result in results.values()), results
        numbers, values = results["a"]
        assert numbers == list(range(1, len(numbers) + 1))
        assert results["b"][0] == results["c"][0] == numbers
        assert results["d"][0] == numbers[-len(results["d"][0]) :]
        for name in "bcd":
            for one, other in zip(results[name][1], values):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        assert list(tmp_path.glob("behind *")), "nobody stood in"


def train_slowly(case: Case) -> Any:
    """In step 3 a micro-batch takes a third of the patience, and a share longer than that."""
    model = network(False)

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if trainer is not None and trainer._run.committed == 2 and os.environ.get("RAGTAG_WORKER") == "b":
            time.sleep(0.3 * PATIENCE_S)
        return cross_entropy(model, batch)

    trainer: Any = None
    with places(case.faults):
        shares = (6, 5, 5) if os.environ.get("RAGTAG_WORKER") else None
        trainer = trainer_of(model, loss_fn=loss_fn, shares=shares, settings={"micro_batch": 1})
        for report in trainer.steps(5):
            tell_step(report.number)
        trainer.close()
    return [p.detach().clone() for p in model.parameters()]


def test_a_worker_with_much_own_work_hears_between_two_pieces_that_another_was_lost(tmp_path: Path) -> None:
    case = Case(faults=(Fault(name="c", place="before wait reducing gradients", nth=3),))
    with crew_of(tmp_path, "abc", train_slowly, case) as crew:
        results = crew.results()
        assert isinstance(results["b"], list), results["b"]
        for one, other in zip(results["a"], results["b"]):
            assert torch.equal(one, other)


def train_and_look_back(directory: Path) -> Any:
    """Lose the last worker of four, then of three; the others look what is left before any of them ends."""
    groups = []
    trainer = trainer_of(network(False))
    for report in trainer.steps(12):
        inner: Any = trainer._group._inner  # pyright: ignore[reportAttributeAccessIssue]
        if not groups or groups[-1]() is not inner:
            groups.append(weakref.ref(inner))
        del inner
        if (report.number, trainer.rank) in ((4, 3), (8, 2)):
            os.kill(os.getpid(), signal.SIGKILL)
    end_s = time.monotonic() + 8.0
    threads: list[str] = []
    while time.monotonic() < end_s and (
        any(ref() is not None for ref in groups[:-1]) or len(threads) != len(set(threads))
    ):
        gc.collect()
        time.sleep(0.05)
        threads = [thread.name for thread in threading.enumerate()]
    (directory / f"looked {trainer.rank}").touch()
    wait_for(directory / f"looked {1 - trainer.rank}")
    with pytest.raises(SettingError, match="a second Trainer"):
        ragtag.Trainer(network(False), torch.optim.SGD, cross_entropy, Data(False), global_batch_size=16)
    trainer.close()
    return {"groups": len(groups), "alive": sum(ref() is not None for ref in groups[:-1]), "threads": sorted(threads)}


def test_nothing_is_left_of_generations_that_are_over(tmp_path: Path) -> None:
    with crew_of(tmp_path, "abcd", train_and_look_back, tmp_path) as crew:
        results = list(crew.results().values())
        assert results.count(-signal.SIGKILL) == 2, results
        for result in results:
            if result != -signal.SIGKILL:
                assert isinstance(result, dict), result
                assert result["groups"] == 3
                assert result["alive"] == 0, result
                assert len(result["threads"]) == len(set(result["threads"])), result


def look_for_notes() -> Any:
    group = join(PATIENCE_S)
    group.wait(group.posted("nothing"), "looking for notes")
    group.barrier("both have looked")
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    end_s = time.monotonic() + 10.0
    while time.monotonic() < end_s:
        group.wait(group.posted("nothing"), "looking for notes")
    return "nobody was lost"


def test_who_asks_the_store_of_a_worker_that_was_killed_has_lost_that_worker() -> None:
    _, error = run_ranks(2, look_for_notes, expect_failures=True)
    assert isinstance(error, PeerLost), error
    assert error.rank == 0
