"""Under launchers: who evicts a run gets a checkpoint, and starting it again goes on from there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import ragtag
from ragtag.checkpoint.directory import mark_of
from ragtag.cli.launch import request
from tests.runtime import cases
from tests.runtime.reference import worst_difference

ROOT = Path(__file__).parents[2]
RAGTAG = [sys.executable, "-m", "ragtag.cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

TRAINS = """
import os, signal, sys, torch
import ragtag
from tests.runtime import cases

torch.set_num_threads(1)
model = cases.mlp()
trainer = ragtag.Trainer(model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8)
for report in trainer.steps(10**9):
    if report.number == 3 and trainer.rank == 0:
        os.kill(os.getppid(), getattr(signal, sys.argv[1]))
"""


def run(command, **more):
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90)


def assert_goes_on(directory):
    """One process goes on where several stopped, and ends where one that was never stopped does."""
    parameters, done = [], 0
    for config in (ragtag.Config(checkpoint=directory), ragtag.Config()):
        model = cases.mlp()
        with ragtag.Trainer(
            model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8, config=config
        ) as trainer:
            done = done or trainer._run.committed
            list(trainer.steps(done + 5))
        parameters.append(cases.values(model))
    assert done > 3
    assert worst_difference(*parameters) < 1e-10
    return done


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_launch_ends_with_a_checkpoint(tmp_path, name, status):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    runs = tmp_path / "runs"
    answer = run(
        [*RAGTAG, "launch", "--fixed", "--no-page", "--local", "2", "--checkpoint", str(runs), str(script), name]
    )
    assert answer.returncode == status, answer.stderr
    done = assert_goes_on(runs)
    first, second, last = [line for line in answer.stderr.splitlines() if not line.startswith("ragtag: step ")]
    assert first == f"ragtag launch: {name}: ending with a checkpoint; Ctrl-C (again) ends at once"
    assert second.startswith(f"stopped by {name} after step {done}, which is saved in {runs}/")
    assert last == f"ragtag launch: stopped by {name}; all 2 workers have ended"


def test_torchrun_ends_with_a_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    runs = tmp_path / "runs"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script), "SIGTERM"]
    answer = run(command, RAGTAG_CHECKPOINT=str(runs))
    assert answer.returncode != 0
    assert f"which is saved in {runs}/" in answer.stderr
    assert_goes_on(runs)


def test_the_option_is_passed_on(tmp_path):
    (tmp_path / "train.py").write_text("")
    assert request(script=str(tmp_path / "train.py"), checkpoint="s3://bucket/run").checkpoint == "s3://bucket/run"


# ---- weights for everything that is not ragtag


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("export")
    model = Tied()
    tokens = torch.arange(40) % 11

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    config = ragtag.Config(checkpoint=path / "runs", checkpoint_every_steps=2)
    with ragtag.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn,
        torch.utils.data.TensorDataset(tokens, tokens.roll(1)), global_batch_size=8, config=config,
    ) as trainer:  # fmt: skip
        list(trainer.steps(4))
        trainer.save(path / "by-hand")
    return path, model


def export(*words):
    from ragtag.cli.main import app

    return app([*map(str, ("export", *words))], standalone_mode=False)


@pytest.mark.parametrize("source", ["runs", "by-hand"])
def test_weights_have_the_models_own_names(trained, tmp_path, capsys, source):
    path, model = trained
    export(path / source, tmp_path / "weights.safetensors", "--json")
    said = json.loads(capsys.readouterr().out)
    weights = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert set(weights) == set(model.state_dict())
    fresh = Tied()
    fresh.load_state_dict(weights)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert (said["step"], said["tensors"], said["left_out"]) == (4, len(weights), [])
    with safetensors.safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_passes_over_a_damaged_one_and_says_so(trained, tmp_path, capsys, caplog):
    path, _ = trained
    (tmp_path / "runs").mkdir()
    for file in (path / "runs").iterdir():
        content = bytearray(file.read_bytes())
        if (mark := mark_of(file.name)) and mark.step == 4:
            content[-9] ^= 1
        (tmp_path / "runs" / file.name).write_bytes(content)
    export(tmp_path / "runs", tmp_path / "w")
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'w'}: 7 tensors, ")
    assert ", after step 2 (" in said
    assert "is damaged" in caplog.text


@pytest.mark.parametrize(
    ("checkpoint", "weights", "part"),
    [
        ("nowhere", "w", "there is no checkpoint file or directory nowhere"),
        ("empty", "w", "there is no checkpoint in empty that can be read"),
        ("train.py", "w", "cannot read the checkpoint train.py"),
        ("plain.safetensors", "w", "plain.safetensors is a safetensors file but no ragtag checkpoint"),
        ("by-hand", "by-hand", "would replace the checkpoint by-hand itself"),
        ("by-hand", "absent/w", "cannot write the weights file .*absent/w: .*No such file"),
    ],
)
def test_mistakes_in_exporting(trained, tmp_path, monkeypatch, checkpoint, weights, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.py").write_text("x = 1")
    (tmp_path / "by-hand").write_bytes((trained[0] / "by-hand").read_bytes())
    safetensors.torch.save_file({"x": torch.ones(1)}, "plain.safetensors")
    with pytest.raises(ragtag.CheckpointError, match=part):
        export(checkpoint, weights)
    assert not (tmp_path / "w").exists()
