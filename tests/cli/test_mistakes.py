"""What a user sees when something goes wrong under `ragtag launch`: one error, once, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BIN = Path(sys.executable).parent

SCRIPT = """
import os, sys, time, torch, ragtag
mistake, rank = sys.argv[1], int(os.environ.get("RANK", "0"))
if mistake == "bug before the trainer":
    undefined_name
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if mistake == "dataset" and rank == 2 and Data.started: raise OSError("disk on fire")
        return torch.ones(4) * index, torch.zeros(1)
    started = False
torch.manual_seed(0)
model = torch.nn.Linear(5 if mistake == "model" and rank == 1 else 4, 1)
def loss_fn(model, batch):
    if mistake == "loss" and rank == 1 and Data.started: raise RuntimeError("boom in loss")
    if mistake == "silence" and rank == 1 and Data.started: time.sleep(60)
    return (model(batch[0]) - batch[1]).square().mean()
trainer = ragtag.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-5), loss_fn, Data(), global_batch_size=12,
                         precision="fp61" if mistake == "setting" else "fp32",
                         loader={"num_workers": 1} if mistake == "interrupt" else {},
                         config=ragtag.Config(patience_s=1.0 if mistake == "silence" else 10.0))
for step in trainer.steps(100000):
    Data.started = True
    if step.number == 3 and rank == 0: print("three steps", flush=True)
    if mistake == "loop" and rank == 1 and step.number == 3: raise KeyError("boom in loop")
    if mistake == "exit" and rank == 1 and step.number == 3: sys.exit(7)
    if mistake == "killed" and rank == 1 and step.number == 3: os.kill(os.getpid(), 9)
"""

MISTAKES = {
    # what, in the output exactly once, exit status
    "setting": ("precision='fp61' is unknown", 1),
    "loss": ("RuntimeError: boom in loss", 1),
    "dataset": ("DataError: dataset[", 1),
    "loop": ("KeyError: 'boom in loop'", 1),
    "model": ("has shape (1, 5), not (1, 4)", 1),
    "bug before the trainer": ("NameError: name 'undefined_name'", 1),
    "exit": ("rank 1 (pid", 7),
    "killed": ("was killed by SIGKILL", 137),
    "silence": ("rank 1", None),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mistakes") / "train.py"
    path.write_text(SCRIPT)
    return path


def start(script, mistake, launcher=("ragtag", "launch", "--fixed", "--no-page", "--local", "3")):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    command = [*launcher, str(script), mistake]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_behind(script):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(script) in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


QUICK = ("setting", "loss", "killed")
"""One of those before training, in it, and without a word; the others are in the long part."""


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.long]) for each in MISTAKES]
)
def test_one_error_once_everywhere_ended(script, mistake):
    text, status = MISTAKES[mistake]
    process = start(script, mistake)
    output, _ = process.communicate(timeout=60)
    assert output.count(text) == 1 or mistake == "silence", output
    assert text in output
    assert output.count("Traceback (most recent call last)") <= (2 if mistake == "dataset" else 1), output
    assert process.returncode == status if status is not None else process.returncode != 0, output
    assert not left_behind(script)


def test_ctrl_c_ends_all_workers_within_5_s(script):
    process = start(script, "interrupt")
    assert process.stdout is not None
    assert "three steps" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 130
    assert "Traceback" not in output, output
    assert not left_behind(script)


def test_torchrun_ends_too_when_one_rank_fails(script):
    process = start(script, "loop", launcher=("torchrun", "--nproc-per-node=3"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert output.count("KeyError: 'boom in loop'") == 1, output
    assert not left_behind(script)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "many"}, "MASTER_PORT"),
    ],
)
def test_a_half_set_environment_is_one_error(script, environ, text):
    environ = {**os.environ, **environ}
    done = subprocess.run(
        [sys.executable, str(script), "none"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "LaunchError" in done.stderr
    assert text in done.stderr
    assert done.stderr.count("Traceback") == 1
