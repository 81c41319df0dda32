"""Half precision, a plan's first shares and emulated links, where ranks come and go."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.crew import Crew, tell_step
from tests.elastic.hostile_cases import Data, Fault, network, places, trainer_of
from tests.ranks import solo

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCE = Path(__file__).parents[2] / "src"
STEPS = 40


class Singles(Data):
    """In single precision, with one sample that is not finite."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        features, label = super().__getitem__(index)
        return features.float(), label


def train_in(precision: str, faults: tuple[Fault, ...], until: str) -> Any:
    model = network(False).float()
    with places(faults):
        trainer = trainer_of(model, torch.optim.SGD, data=Singles(True), precision=precision, shuffle=False)
        losses, skipped = {}, []
        for report in trainer.steps(STEPS):
            losses[report.number] = report.loss
            if report.skipped:
                skipped.append(report.number)
            tell_step(report.number)
            if not Path(os.environ.get("CREW_DIRECTORY", ""), f"{until}.step").exists():
                time.sleep(0.1 if until else 0.0)
        ranks, scale = len(report.shares), trainer._run.loss_scale.state_dict()
        trainer.close()
    return {"values": [p.detach().clone() for p in model.parameters()], "losses": losses, "skipped": skipped} | {
        "scale": scale,
        "ranks": ranks,
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_survives_losses_and_newcomers(tmp_path: Path, precision: str) -> None:
    """Sample 17 is in steps 2, 8, ...: the loss scale goes down there, on all ranks alike, newcomers too."""
    reference = solo(train_in, precision, (), "")
    assert len(reference["skipped"]) >= 5
    faults = (
        Fault(name="b", place="before exchanging votes", nth=3),
        Fault(name="c", place="before apply", nth=8),
    )
    with Crew(tmp_path, expected=4, patience_s=4.0) as crew:
        for name in "abcd":
            crew.start(name, train_in, precision, faults, "e")
        crew.wait_for_step(10, "a")
        crew.start("e", train_in, precision, faults, "e")
        results = crew.results()
    assert results["b"] == results["c"] == -signal.SIGKILL
    assert results["a"]["ranks"] == 3
    for name in "ade":
        result = results[name]
        assert isinstance(result, dict), result
        first = min(result["losses"])
        assert (first > 10) == (name == "e")
        assert result["skipped"] == [number for number in reference["skipped"] if number >= first]
        assert result["scale"] == reference["scale"]
        for one, other, expected in zip(result["values"], results["a"]["values"], reference["values"]):
            assert torch.equal(one, other), "replicas are equal to the last bit"
            torch.testing.assert_close(one, expected, rtol=0, atol=2e-3)


# A plan


def train_as_planned(shares: str, micro_batch: str, until: int) -> Any:
    if os.environ["RAGTAG_WORKER"] != "guest":
        os.environ["RAGTAG_START_SHARES"], os.environ["RAGTAG_START_MICRO_BATCH"] = shares, micro_batch
    model = network(False)
    trainer = trainer_of(model)
    first = None
    for report in trainer.steps(400):
        first = first or (report.number, report.shares)
        tell_step(report.number)
        time.sleep(0.02)
        if report.number >= 20 and len(report.shares) == until:
            break
    last = len(report.shares)
    trainer.close()
    return first, last


def test_a_plan_is_what_the_first_generation_begins_with_and_a_guest_joins_it(tmp_path: Path) -> None:
    with Crew(tmp_path, expected=2, patience_s=4.0) as crew:
        for name in "ab":
            crew.start(name, train_as_planned, "13,3", "13,3", 3)
        crew.wait_for_step(3, "a", "b")
        crew.start("guest", train_as_planned, "13,3", "13,3", 3)
        results = crew.results()
    assert all(isinstance(result, tuple) for result in results.values()), results
    assert results["a"] == results["b"] == ((1, (13, 3)), 3)
    assert results["guest"][0][0] > 3


def test_a_plan_for_others_than_those_that_begin_is_no_obstacle(tmp_path: Path) -> None:
    with Crew(tmp_path, expected=3, patience_s=4.0) as crew:
        for name in "abc":
            crew.start(name, train_as_planned, "13,3", "13,3", 3)
        results = crew.results()
    assert all(isinstance(result, tuple) for result in results.values()), results
    assert sorted(results["a"][0][1]) == [5, 5, 6]


# Emulated links


LINKED = """
import json, os, time, torch, ragtag
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
trainer = ragtag.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), data, global_batch_size=8,
)
name = f"steps-{os.environ['RANK']}-{os.getpid()}"
for step in trainer.steps(10**6):
    with open(name, "a") as file:
        print(json.dumps([step.number, len(step.shares), step.wall_s]), file=file)
    if os.path.exists("enough"):
        break
"""
CLUSTER = """
[[device]]
name = "desk"
host = "desk"
[[device]]
name = "shed"
host = "shed"
[[link]]
between = ["desk", "shed"]
latency = "60 ms"
"""


def steps_of(directory: Path, worker: int) -> dict[int, list[list[float]]]:
    """By process: number, ranks and seconds of each step."""
    return {
        int(file.name.rpartition("-")[2]): [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        for file in directory.glob(f"steps-{worker}-*")
    }


@pytest.mark.long
def test_emulated_links_are_slow_in_every_generation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LINKED)
    (tmp_path / "home.toml").write_text(CLUSTER)

    def together(pid: int, count: int = 4) -> list[float]:
        """Seconds of the last steps of two ranks that this process was in."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            mine = [step for step in steps_of(tmp_path, 1).get(pid, []) if step[1] == 2]
            if len(mine) > count:
                return [seconds for _, _, seconds in mine[1:]]
            time.sleep(0.05)
        raise AssertionError((tmp_path / "terminal").read_text())

    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context((tmp_path / "terminal").open("wb"))
        launch = subprocess.Popen(
            [sys.executable, "-m", "ragtag.cli.main", "launch", "--quiet", "--emulate", "home.toml", "train.py"],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RAGTAG_PATIENCE_S": "6"},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.STDOUT,
        )
        stack.callback(launch.wait)
        stack.callback(launch.kill)
        killed: set[int] = set()
        for _ in range(2):
            end_s = time.monotonic() + 60
            while not (new := set(steps_of(tmp_path, 1)) - killed):
                assert time.monotonic() < end_s, (tmp_path / "terminal").read_text()
                assert launch.poll() is None, (tmp_path / "terminal").read_text()
                time.sleep(0.05)
            (pid,) = new
            # A ring of two sends twice, one after the other, and votes are late by as much.
            assert min(together(pid)) > 0.12
            if not killed:
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        (tmp_path / "enough").touch()
        assert launch.wait(60) == 0, (tmp_path / "terminal").read_text()
    alone = [seconds for steps in steps_of(tmp_path, 0).values() for _, ranks, seconds in steps if ranks == 1]
    assert alone
    assert min(alone) < 0.12, "who is alone sends nothing"
