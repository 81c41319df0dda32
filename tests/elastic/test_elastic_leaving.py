"""SIGTERM for one worker: it leaves after a step, the others go on, and what all hold is saved where that is wanted."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ragtag.checkpoint.directory import mark_of
from ragtag.checkpoint.file import load_file
from ragtag.runtime.boundary import what_signals_ask
from tests.elastic.crew import Crew, tell_step
from tests.elastic.hostile_cases import cross_entropy, network, trainer_of
from tests.ranks import solo

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 4.0
STEPS = 90


def test_what_signals_ask_of_ranks() -> None:
    term, interrupt = signal.SIGTERM, signal.SIGINT
    assert what_signals_ask([0, 0], elastic=True) == (0, False)
    assert what_signals_ask([0, term], elastic=True) == (0, True)
    assert what_signals_ask([interrupt, term], elastic=True) == (interrupt, True)
    assert what_signals_ask([0, term], elastic=False) == (term, False)


def train(settings: dict[str, Any], pause_s: float) -> Any:
    model = network(False)
    trainer = trainer_of(model, torch.optim.AdamW, patience_s=PATIENCE_S, settings=settings)
    numbers = []
    for report in trainer.steps(STEPS):
        numbers.append(report.number)
        tell_step(report.number)
        time.sleep(pause_s)
    trainer.close()
    return numbers, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.long)])
def test_one_after_another_leaves_and_the_last_one_ends_as_one_would(tmp_path: Path, kept: bool) -> None:
    settings = {"checkpoint": str(tmp_path / "kept"), "checkpoint_every_s": None} if kept else {}
    _, expected = solo(train, {}, 0.0)
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, settings, 0.05)
        crew.wait_for_step(5, *"abc")
        left = []
        # In this order the first rank is among those who leave, whichever it is.
        for name in "ba":
            before = crew._step_of("c")
            began_s = time.monotonic()
            crew.signal(name, signal.SIGTERM)
            result = crew.results(name)[name]
            assert isinstance(result, SystemExit), result
            assert result.code == 128 + signal.SIGTERM
            assert time.monotonic() - began_s < PATIENCE_S, "it does not wait for any patience"
            left.append(before)
            crew.wait_for_step(crew._step_of("c") + 3, "c")
        numbers, values = crew.results("c")["c"]
        assert numbers == list(range(1, STEPS + 1))
        for mine, reference in zip(values, expected):
            torch.testing.assert_close(mine, reference, rtol=0, atol=1e-9)
        if kept:
            marks = [mark for file in (tmp_path / "kept").iterdir() if (mark := mark_of(file.name))]
            assert len(marks) >= 2, "one for each that left"
            for before in left:
                assert any(before < mark.step for mark in marks)
            for mark in marks:
                assert load_file(tmp_path / "kept" / mark.name)["committed"] == mark.step


def train_with_one_that_hangs(seconds: float) -> Any:
    model = network(False)

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if os.environ["RAGTAG_WORKER"] == "b" and trainer is not None and trainer._run.committed == 4:
            tell_step(1000)
            time.sleep(seconds)
        return cross_entropy(model, batch)

    trainer = None
    # Pinned, so that it has work in every step.
    trainer = trainer_of(model, loss_fn=loss_fn, patience_s=2.0, settings={"cover_stalls": False}, shares=(8, 8))
    list(trainer.steps(12))
    trainer.close()
    return "ended"


def test_one_that_comes_to_no_boundary_leaves_within_the_patience(tmp_path: Path) -> None:
    with Crew(tmp_path, expected=2, patience_s=2.0) as crew:
        for name in "ab":
            crew.start(name, train_with_one_that_hangs, 60.0)
        crew.wait_for_step(1000, "b")
        crew.signal("b", signal.SIGTERM)
        results = crew.results(timeout=20.0)
        assert results["a"] == "ended"
        assert isinstance(results["b"], SystemExit)
        assert results["b"].code == 128 + signal.SIGTERM


# As a person does it


SCRIPT = """
import os, time, torch, ragtag
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
trainer = ragtag.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), data, global_batch_size=8,
)
for step in trainer.steps(10**6):
    name = f"worker-{os.environ['RAGTAG_WORKER'].rpartition('/')[2]}"
    with open(f"{name}.new", "w") as file:
        file.write(f"{os.getpid()} {step.number} {len(step.shares)}")
    os.rename(f"{name}.new", name)
    time.sleep(0.02)
    if os.path.exists("enough"):
        break
"""


@contextlib.contextmanager
def launched(directory: Path, *words: str, quiet: bool = True):
    """`ragtag launch WORDS` of the script in `directory`, with two workers."""
    (directory / "train.py").write_text(SCRIPT)
    with (directory / "terminal").open("wb") as terminal:
        launch = subprocess.Popen(
            [
                *(sys.executable, "-m", "ragtag.cli.main", "launch", "--local", "2"),
                *(*(["--quiet"] if quiet else []), *words, "train.py"),
            ],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RAGTAG_PATIENCE_S": "4"},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.STDOUT,
        )
    try:
        yield launch
    finally:
        launch.kill()
        launch.wait()


def reaches(directory: Path, worker: int, *, ranks: int, steps: int = 3, timeout_s: float = 60.0) -> int:
    """Wait until this worker has done so many more steps with so many ranks; return its pid."""
    end_s, first = time.monotonic() + timeout_s, None
    while True:
        with contextlib.suppress(FileNotFoundError):
            pid, number, together = map(int, (directory / f"worker-{worker}").read_text().split())
            first = number if first is None or together != ranks else first
            if together == ranks and number >= first + steps:
                return pid
        assert time.monotonic() < end_s, (directory / "terminal").read_text()
        time.sleep(0.02)


def test_the_launcher_goes_on_without_a_worker_that_was_told_to_leave(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        reaches(tmp_path, 0, ranks=2)
        pid = reaches(tmp_path, 1, ranks=2)
        os.kill(pid, signal.SIGTERM)
        reaches(tmp_path, 0, ranks=1)
        (tmp_path / "enough").touch()
        status = launch.wait(30)
        text = (tmp_path / "terminal").read_text()
        assert status == 0, text
        assert f"ragtag launch: worker 1 (pid {pid}) was told by SIGTERM to leave, and has" in text
        assert "starting another one" not in text
        assert "Traceback" not in text


@pytest.mark.parametrize("whom", [pytest.param("launcher", marks=pytest.mark.long), "everybody"])
def test_a_machine_that_goes_away_leaves_a_checkpoint(tmp_path: Path, whom: str) -> None:
    """Everybody: as systemd, Slurm and most containers do it, the hub too."""
    with launched(tmp_path, "--checkpoint", "kept") as launch:
        reaches(tmp_path, 0, ranks=2)
        processes = psutil.Process(launch.pid).children(recursive=True) if whom == "everybody" else []
        for process in processes:
            if "ragtag.hub" not in process.cmdline():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)
        launch.send_signal(signal.SIGTERM)
        status = launch.wait(30)
        text = (tmp_path / "terminal").read_text()
        assert status == 128 + signal.SIGTERM, text
        marks = [mark for file in (tmp_path / "kept").iterdir() if (mark := mark_of(file.name))]
        assert marks, text
        assert "Traceback" not in text
