"""`with Trainer(...)` ends as a script without `with` does: each error is printed once, with the status that says whose
it was."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.elastic.crew import Crew

SOURCE = Path(__file__).parents[2] / "src"
FORK_SCRIPTS = Path(__file__).parents[1] / "comm" / "fork_scripts.py"
SCRIPT = """
import os, signal, sys, torch, ragtag

rank, (kind, what) = int(os.environ["RANK"]), sys.argv[1].split("-")
if kind == "elastic":
    del os.environ["WORLD_SIZE"]
    os.environ["RAGTAG_HUB"], os.environ["RAGTAG_TOKEN"] = os.environ[f"HUB_{what}"].split()
    os.environ |= {"RAGTAG_RUN": "test", "RAGTAG_WORKER": f"home/{rank}", "LOCAL_WORLD_SIZE": "2"}
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
with ragtag.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), data, global_batch_size=8,
    config=ragtag.Config(patience_s=5.0),
) as trainer:
    for step in trainer.steps(12 if what == "fine" else 2000):
        if rank == 1 and step.number == 6:
            if what == "raise":
                raise ValueError("a bad sample")
            if what == "exit":
                sys.exit(3)
            if what == "SIGINT":
                os.kill(os.getpid(), signal.SIGINT)
        if what == "load" and step.number == 6:
            trainer.load("nowhere.safetensors")
"""
WORDS = ("fine", "raise", "exit", "SIGINT", "load")
KINDS = ("fixed", "elastic")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    directory = tmp_path_factory.mktemp("with")
    (directory / "train.py").write_text(SCRIPT)
    environ = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        for word in WORDS:
            (directory / word).mkdir()
            crew = stack.enter_context(Crew(directory / word, patience_s=5.0))
            environ[f"HUB_{word}"] = f"127.0.0.1:{crew.port} {crew.token}"
        runs = [f"2:{kind}-{word}" for kind in KINDS for word in WORDS]
        answer = subprocess.run(
            [sys.executable, str(FORK_SCRIPTS), str(directory / "train.py"), *runs],
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=110,
        )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def of(ended, kind, word):
    outcomes = ended[f"{kind}-{word}"]
    return [each["status"] for each in outcomes], [each["err"] for each in outcomes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_ends_well_ends_in_silence(ended, kind):
    assert of(ended, kind, "fine") == ([0, 0], ["", ""])


@pytest.mark.parametrize("kind", KINDS)
def test_another_ranks_exception_is_not_printed_again(ended, kind):
    statuses, errors = of(ended, kind, "raise")
    assert statuses == [75, 1], errors
    assert errors[1].count("Traceback") == 1
    assert "ValueError: a bad sample\n[ragtag] on rank" in errors[1]
    assert errors[0] == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("word", "status"), [("exit", 3), ("SIGINT", 130)])
def test_asking_for_a_status_and_ctrl_c_are_quiet(ended, kind, word, status):
    assert of(ended, kind, word) == ([75, status], ["", ""])


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_all_ranks_raise_is_printed_once(ended, kind):
    statuses, errors = of(ended, kind, "load")
    assert statuses == [1, 1], errors
    assert "".join(errors).count("Traceback") == 1, errors
    assert "".join(errors).count("there is no checkpoint file nowhere.safetensors") == 1, errors
