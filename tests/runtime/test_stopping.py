"""Ctrl-C and SIGTERM while checkpoints are kept, in scripts that run to their very end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragtag.checkpoint.directory import mark_of

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, threading, time, torch
import ragtag
from tests.runtime import cases

word, folder = sys.argv[1], os.environ["FOLDER"]
rank, model = int(os.environ["RANK"]), cases.mlp()
if word == "loader":
    os.setsid()
patience_s = 1.0 if word == "deaf" else 3.0 if word in ("stuck", "own") else 30.0
if word == "own":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
trainer = ragtag.Trainer(
    model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8,
    loader={"num_workers": 1} if word == "loader" else None,
    config=ragtag.Config(checkpoint=None if word == "off" else f"{folder}/{word}", patience_s=patience_s),
)

def tell(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # where the handler runs

try:
    for report in trainer.steps(8):
        if report.number == 3 and rank == trainer.world_size - 1:
            if word == "SIGTERM":  # who evicts may well say so twice
                tell(signal.SIGTERM)
                tell(signal.SIGTERM)
            if word in ("SIGINT", "twice", "off"):
                tell(signal.SIGINT)
            if word == "twice":
                tell(signal.SIGINT)
            if word in ("stuck", "own"):
                tell(signal.SIGTERM)
                while True:
                    time.sleep(0.05)
            if word == "deaf":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
                # No exception reaches who sleeps so; another thread hears the signal.
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            if word == "loader":
                os.killpg(0, signal.SIGTERM)
        print(report.number, flush=True)
finally:
    print("tidied up", flush=True)
"""
RUNS = ["2:SIGTERM", "1:SIGINT", "1:twice", "1:off", "2:stuck", "1:deaf", "1:loader", "1:own"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def ended(folder):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environ = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "FOLDER": str(folder)}
    answer = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "comm" / "fork_scripts.py"), str(script), *RUNS],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def saved(folder, word):
    return [mark_of(name).step for name in sorted(os.listdir(folder / word)) if mark_of(name)]


@pytest.mark.parametrize(("word", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("loader", 143)])
def test_the_step_under_way_is_finished_and_saved(ended, folder, word, status):
    outcomes = ended[word]
    assert [outcome["status"] for outcome in outcomes] == [status] * len(outcomes), outcomes
    assert [outcome["out"] for outcome in outcomes] == ["1\n2\n3\n4\ntidied up\n"] * len(outcomes)
    assert saved(folder, word) == [4]
    first, *others = [outcome["err"] for outcome in outcomes]
    name = "SIGINT" if status == 130 else "SIGTERM"
    assert first.startswith(f"stopped by {name} after step 4, which is saved in {folder / word}/")
    assert first.count("\n") == 1
    assert others == [""] * len(others)


def test_a_second_ctrl_c_ends_at_once(ended, folder):
    [outcome] = ended["twice"]
    assert outcome["status"] in (130, -2)
    assert outcome["out"] == "1\n2\ntidied up\n"
    assert saved(folder, "twice") == []


def test_without_checkpoints_ctrl_c_ends_at_once(ended):
    [outcome] = ended["off"]
    assert outcome["status"] in (130, -2)
    assert outcome["out"] == "1\n2\ntidied up\n"
    assert "KeyboardInterrupt" in outcome["err"]


def test_when_no_step_ends_in_time_the_rank_says_so_and_ends_without(ended, folder):
    first, last = ended["stuck"]
    said = "was to end by SIGTERM, but no step ended within patience_s = 3 s (step 3, the script's own code"
    assert last["status"] == 143
    assert last["err"].startswith("rank 1 (")
    assert said in last["err"]
    assert f"what was kept before is in {folder / 'stuck'}." in last["err"]
    assert last["out"] == "1\n2\ntidied up\n"
    assert first["status"] == 75, "a victim"
    assert saved(folder, "stuck") == []


def test_a_thread_that_hears_nothing_is_ended_all_the_same(ended):
    [outcome] = ended["deaf"]
    assert outcome["status"] == 143
    assert "no step ended within patience_s = 1 s" in outcome["err"]
    assert outcome["wall_s"] < 30


def test_a_handler_of_the_scripts_own_stays(ended, folder):
    [outcome] = ended["own"]
    assert outcome["status"] == 7
    assert outcome["out"] == "1\n2\ntidied up\n"
