"""Training while workers come and go: the parameters are those of a run in which nothing happened."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ragtag
from ragtag.runtime import step
from ragtag.runtime.settling import Settling
from tests.elastic.crew import Crew, tell_step
from tests.ranks import solo

STEPS = 12
DATA = [(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(97)]


class Fault:
    """What happens, once, to the worker called `name` in one phase of one step."""

    def __init__(self, name: str = "", step: int = 0, phase: str = "", act: str = "kill") -> None:
        self.name, self.step, self.phase, self.act = name, step, phase, act
        self.now: Callable[[], int] | None = None
        self.done = False

    def here(self, phase: str) -> None:
        if (
            not self.done
            and phase == self.phase
            and os.environ.get("RAGTAG_WORKER") == self.name
            and self.now
            and self.now() == self.step
        ):
            self.done = True
            if self.act == "sleep":
                time.sleep(15.0)
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.act])


class Data:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        self.fault.here("data")
        return DATA[index]


def train(fault: Fault | None = None, steps: int = STEPS, pause_s: float = 0.0) -> dict[str, Any]:
    fault = fault or Fault()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        fault.here("forward")
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        if loss.requires_grad:
            loss.register_hook(lambda grad: fault.here("backward"))
        return loss

    reduce_and_vote, vote, apply = Settling._reduce_and_vote, Settling._vote, step.apply

    def reducing(self: Settling, **words: Any) -> Any:
        fault.here("reducing")
        return reduce_and_vote(self, **words)

    def holding(self: Settling, outcome: Any) -> None:
        fault.here("holding")
        vote(self, outcome)

    def applying(*words: Any, **more: Any) -> Any:
        fault.here("voted")
        return apply(*words, **more)

    with (
        mock.patch.object(Settling, "_reduce_and_vote", reducing),
        mock.patch.object(Settling, "_vote", holding),
        mock.patch.object(step, "apply", applying),
    ):
        trainer = ragtag.Trainer(
            model,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
            loss_fn,
            Data(fault),
            global_batch_size=14,
            config=ragtag.Config(patience_s=3.0, micro_batch=2),
        )
        fault.now = lambda: trainer._run.committed + 1
        losses, generations, walls = {}, [], {}
        for report in trainer.steps(steps):
            losses[report.number] = report.loss
            generations.append((report.number, report.generation % 1000, len(report.shares)))
            walls[report.number] = report.wall_s
            tell_step(report.number)
            time.sleep(pause_s)
        values = [p.detach().clone() for p in model.parameters()]
        trainer.close()
    return {"values": values, "losses": losses, "generations": generations, "walls": walls}


def check(result: Any, reference: dict[str, Any]) -> None:
    assert isinstance(result, dict), result
    for mine, expected in zip(result["values"], reference["values"]):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)
    for number, loss in result["losses"].items():
        assert abs(loss - reference["losses"][number]) < 1e-9


def test_three_workers_train_as_one(tmp_path: Path) -> None:
    reference = solo(train)
    with Crew(tmp_path, expected=3) as crew:
        for name in "abc":
            crew.start(name, train)
        for result in crew.results().values():
            check(result, reference)
            assert result["generations"][0][2] == 3


PHASES = ("data", "forward", "backward", "reducing", "holding", "voted")


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_is_killed_in_any_phase(tmp_path: Path, phase: str) -> None:
    reference = solo(train)
    with Crew(tmp_path, expected=3) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 5, phase))
        results = crew.results()
        assert results["b"] == -signal.SIGKILL
        for name in "ac":
            check(results[name], reference)
            assert results[name]["generations"][3][2] == 3
            assert results[name]["generations"][5][2] == 2
            assert len(results[name]["losses"]) == STEPS
            print(phase, name, results[name]["generations"][3:7], results[name]["walls"][5], results[name]["walls"][6])


def test_two_die_in_one_step_and_all_but_one_in_the_end(tmp_path: Path) -> None:
    reference = solo(train)
    with Crew(tmp_path, expected=4) as crew:
        for name, fault in {
            "a": None,
            "b": Fault("b", 4, "backward"),
            "c": Fault("c", 4, "reducing"),
            "d": Fault("d", 8, "data"),
        }.items():
            crew.start(name, train, fault)
        results = crew.results()
        check(results["a"], reference)
        assert results["a"]["generations"][-1][2] == 1
        assert len(results["a"]["losses"]) == STEPS


def test_a_worker_joins_a_run_under_way(tmp_path: Path) -> None:
    steps = 60
    reference = solo(train, None, steps)
    with Crew(tmp_path, expected=2) as crew:
        for name in "ab":
            crew.start(name, train, None, steps, 0.05)
        crew.wait_for_step(5, "a", "b")
        crew.start("c", train, None, steps, 0.05)
        results = crew.results()
        for result in results.values():
            check(result, reference)
        assert results["a"]["generations"][-1][2] == 3
        assert 2 < len(results["c"]["losses"]) < steps
        assert len(results["a"]["losses"]) == steps


def test_a_frozen_worker_is_given_up_and_told_so_when_it_wakes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = 120
    reference = solo(train, None, steps)
    with Crew(tmp_path, expected=3, patience_s=3.0) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 5, "forward", "stop"), steps, 0.05)
        crew.wait_for_step(10, "a", "c")
        crew.signal("b", signal.SIGCONT)
        woken = crew.results("b")["b"]
        assert f"b ({socket.gethostname()}) was given up and the others went on without it: no sign of life" in str(
            woken
        )
        assert f"no sign of life from b ({socket.gethostname()}) for " in capfd.readouterr().err
        for result in crew.results("a", "c").values():
            check(result, reference)
            assert result["generations"][-1][2] == 2


def test_a_worker_whose_data_stalls_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = 120
    reference = solo(train, None, steps)
    with Crew(tmp_path, expected=3, patience_s=3.0) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 5, "data", "sleep"), steps, 0.05)
        for result in crew.results("a", "c").values():
            check(result, reference)
            assert result["generations"][-1][2] == 2
        assert f"data stall: b ({socket.gethostname()}) has been reading data for " in capfd.readouterr().err


def linear_trainer() -> ragtag.Trainer:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3).double()
    return ragtag.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        DATA,
        global_batch_size=14,
        config=ragtag.Config(patience_s=3.0),
    )


def evaluate_at(phase_step: int, name: str) -> Any:
    def metric_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if trainer._run.committed == phase_step and os.environ.get("RAGTAG_WORKER") == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = linear_trainer()
    values = []
    for _ in range(3):
        for report in trainer.steps(4):
            if report.number == 6:
                values.append(float(trainer.evaluate(DATA, metric_fn)))
            tell_step(report.number)
        values.append(float(trainer.evaluate(DATA, metric_fn)))
        time.sleep(0.5 if name else 0.0)
    trainer.close()
    return values


@pytest.mark.parametrize("step", [6, 8])
def test_a_worker_is_killed_while_all_evaluate_and_another_one_joins(tmp_path: Path, step: int) -> None:
    reference = solo(evaluate_at, -1, "")
    with Crew(tmp_path, expected=3) as crew:
        for name in "abc":
            crew.start(name, evaluate_at, step, "b")
        crew.wait_for_step(4, "a", "c")
        crew.start("d", evaluate_at, step, "b")
        results = crew.results()
        for name in "ac":
            assert results[name] == pytest.approx(reference, abs=1e-12), results
        if isinstance(results["d"], list):  # else it came too late
            assert results["d"][-1] == pytest.approx(reference[-1], abs=1e-12)


def test_the_hub_is_killed_and_comes_back(tmp_path: Path) -> None:
    steps = 60
    reference = solo(train, None, steps)
    with Crew(tmp_path, expected=3) as crew:
        for name in "abc":
            crew.start(name, train, None, steps, 0.05)
        crew.wait_for_step(5, "a", "b", "c")
        crew.kill_hub()
        time.sleep(0.5)
        crew.start_hub()
        for result in crew.results().values():
            check(result, reference)
            assert len(result["losses"]) == steps
            assert result["generations"][-1][2] == 3


def fail_at(step: int, name: str) -> Any:
    for report in linear_trainer().steps(STEPS):
        if report.number == step and os.environ["RAGTAG_WORKER"] == name:
            raise ValueError("the user's own mistake")
    return "ended"


def test_an_error_of_the_script_on_one_worker_ends_all_with_it(tmp_path: Path) -> None:
    with Crew(tmp_path, expected=3) as crew:
        for name in "abc":
            crew.start(name, fail_at, 5, "b")
        results = crew.results()
        for result in results.values():
            assert "the user's own mistake" in str(result), results
