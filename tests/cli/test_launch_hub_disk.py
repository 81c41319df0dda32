"""The hub dies and its disk is gone, or takes nothing any more: one clear end, which names the last checkpoint."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ragtag.hub.process import JOURNAL_STATUS, main

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 3.0
TRAINS = """
import time, torch, ragtag
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
trainer = ragtag.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), data, global_batch_size=8,
    config=ragtag.Config(checkpoint="kept", checkpoint_every_steps=5, checkpoint_keep=1),
)
for step in trainer.steps(100000):
    if step.number == 12:
        open("trains", "w").close()
    time.sleep(0.02)
"""


def removed(directory: Path) -> None:
    shutil.rmtree(directory)


def unreadable(directory: Path) -> None:
    """As where the file system is read-only or broken, which root would not notice by permissions."""
    (directory / "hub.journal").unlink()
    (directory / "hub.journal").mkdir()


@pytest.mark.parametrize(
    ("break_disk", "said"),
    [
        (removed, "hub.journal is gone"),
        pytest.param(unreadable, "hub.journal cannot be opened: Is a directory", marks=pytest.mark.long),
    ],
)
def test_a_hub_that_is_killed_when_its_disk_is_gone(tmp_path, break_disk, said):
    (tmp_path / "train.py").write_text(TRAINS)
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context((tmp_path / "terminal").open("wb"))
        words = ["launch", "--local", "2", "--quiet", "--run-dir", "journal", "train.py"]
        launch = subprocess.Popen(
            [sys.executable, "-m", "ragtag.cli.main", *words],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RAGTAG_PATIENCE_S": str(PATIENCE_S)},
            cwd=tmp_path,
            stdout=terminal,
            stderr=subprocess.STDOUT,
        )
        stack.callback(launch.wait)
        stack.callback(launch.kill)
        end_s = time.monotonic() + 60
        while not (tmp_path / "trains").exists():
            assert launch.poll() is None, (tmp_path / "terminal").read_text()
            assert time.monotonic() < end_s, (tmp_path / "terminal").read_text()
            time.sleep(0.02)
        children = psutil.Process(launch.pid).children(recursive=True)
        (hub,) = [each for each in children if "ragtag.hub" in each.cmdline()]
        break_disk(tmp_path / "journal")
        hub.kill()
        status = launch.wait(60)
        text = (tmp_path / "terminal").read_text()
        assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE], text
    assert status == 1, text
    assert f"was killed by {signal.SIGKILL.name}; starting it again" in text
    assert text.count(said) == 1, text
    assert re.search(r"The run's last checkpoint is kept/\S+\.step-\d+\.generation-\d+\.safetensors", text), text
    assert "ragtag launch: the hub has ended with status 74 and cannot be started again" in text
    assert "Traceback" not in text


def test_a_hub_begins_no_other_run_in_place_of_the_one_that_is_lost(tmp_path, capsys):
    words = ["--run", "run", "--run-dir", str(tmp_path / "journal")]
    assert main([*words, "--again"], version="1", environ={"RAGTAG_TOKEN": "t"}) == JOURNAL_STATUS
    assert "hub.journal is gone, and with it who is in the run" in capsys.readouterr().err
    assert not (tmp_path / "journal").exists()
