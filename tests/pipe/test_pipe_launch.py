"""A planned pipeline, launched: stages, micro-batches and ranks as planned, and a log that knows its efficiency."""

import os
import subprocess
import sys

from ragtag.plan.file import PlanFile, PlannedDevice, save_plan
from ragtag.watch.events import Step
from ragtag.watch.reader import read

CLUSTER = """
[emulate]
sample_ms = 20

[[device]]
name = "slow"
speed = 1

[[device]]
name = "quick"
speed = 3
"""

SCRIPT = """
import torch, ragtag
from tests.zero.test_zero_exact import adam, loss_fn
from tests.zero.models import Tokens, tiny

torch.set_num_threads(1)
model = tiny(depth=4)
trainer = ragtag.Trainer(model, adam(model.parameters()), loss_fn, Tokens(), global_batch_size=12)
for report in trainer.steps(6):
    pass
if trainer.rank == 0:
    print("plan", trainer.plan.layout, trainer.plan.stages, trainer.plan.micro_batch, report.shares)
trainer.close()
"""


def test_stages_are_those_of_the_plan(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "train.py").write_text(SCRIPT)
    devices = (
        PlannedDevice(name="slow", samples=12, micro_batch=2, blocks=(3, 4)),
        PlannedDevice(name="quick", samples=0, micro_batch=2, blocks=(0, 3)),
    )
    plan = PlanFile(
        layout="pipeline",
        global_batch_size=12,
        devices=devices,
        predicted_step_s=0.1,
        predicted_samples_per_s=120.0,
        reason="by hand",
    )
    save_plan(plan, tmp_path / "plan.json")
    words = ["launch", "--plan", "plan.json", "--emulate", "cluster.toml", "--no-page", "--run-dir", "run", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "ragtag.cli.main", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("plan ")]
    assert "Stage(rank=1, first=0, stop=3), Stage(rank=0, first=3, stop=4)" in line
    assert line.endswith("(2, 2) (12, 0)"), line
    last = [event for event in read(tmp_path / "run" / "log.jsonl") if isinstance(event, Step)][-1]
    # Three quarters of the model on the device with three quarters of the speed, and a pipeline to fill.
    assert 0.4 < last.eta < 1.05
    assert min(last.sent_bytes) > 0
