"""The published examples and the demo, started as a user would start them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}


def run(*command: str) -> str:
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def test_digits_validate_alike_under_every_launcher():
    arguments = ["-m", "ragtag.examples.digits", "--epochs", "1"]
    alone = run("python", *arguments).split()
    assert float(alone[-1]) > 0.7
    for launcher in (["ragtag", "launch", "--local", "3"], ["torchrun", "--nproc-per-node=2"]):
        words = run(*launcher, *arguments).split()
        assert words[-1] == alone[-1], "the validation accuracy is exact"
        assert float(words[3]) == pytest.approx(float(alone[3]), rel=1e-3)


def test_the_demo_shows_equal_losses_and_parameters():
    result = json.loads(run("ragtag", "demo", "--steps", "4", "--shares", "8,5,3", "--double", "--json"))
    assert result["shares"] == [8, 5, 3]
    assert result["largest_loss_difference"] < 1e-12
    assert result["largest_parameter_difference"] < 1e-10
    assert result["loss_by_workers"] < 6


def test_the_demo_prints_a_table_and_refuses_nonsense():
    table = run("ragtag", "demo", "--steps", "3", "--shares", "3,1")
    assert "loss at step 3" in table
    done = subprocess.run(["ragtag", "demo", "--shares", "a"], env=ENVIRON, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--shares must be whole numbers" in done.stderr
