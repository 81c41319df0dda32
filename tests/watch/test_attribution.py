"""Real ranks, one of which is slowed down: what the log says. `scripts/bench attribution` does it for all causes."""

import json
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch.utils.data import TensorDataset

import ragtag
from ragtag.cli.report import run_report
from ragtag.watch.drawable import drawable
from ragtag.watch.events import Finding, Step, Vitals
from ragtag.watch.reader import read
from ragtag.watch.state import RunState

SLOW, SLOW_S = 1, 0.2
DATA = TensorDataset(torch.linspace(-1, 1, 192).reshape(64, 3), torch.linspace(0, 1, 64).reshape(64, 1))


def train(log: str | None, steps: int, slow_s: float) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    is_slow = int(os.environ["RANK"]) == SLOW

    def loss_fn(model: torch.nn.Module, batch):
        time.sleep(slow_s if is_slow else slow_s / 30)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    config = ragtag.Config(log=log, patience_s=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {"global_batch_size": 12, "shares": (4, 4, 4), "config": config}
    with ragtag.Trainer(model, optimizer, loss_fn, DATA, **options) as trainer:
        return [step.loss for step in trainer.steps(steps)]


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("slow") / "log.jsonl"
    run_ranks(3, train, str(path), 8, SLOW_S)
    return path


def test_the_log_names_the_rank_and_the_cause(log):
    [finding] = [event for event in read(log) if isinstance(event, Finding)]
    assert (finding.rank, finding.cause, finding.over) == (SLOW, "compute", False)
    assert finding.step <= 8
    assert 0.5 * SLOW_S < finding.lost_s < 2 * SLOW_S
    assert f"rank {SLOW} (" in finding.text
    assert " holds the others up by " in finding.text
    steps = [event for event in read(log) if isinstance(event, Step)]
    assert len(steps) == 8
    # On the first rank, whose step may begin a little later than the slow one's.
    assert statistics.median(step.wall_s for step in steps) > 0.8 * SLOW_S, "for all ranks they took as long"


def test_the_log_says_how_the_devices_are(log):
    vitals = [event for event in read(log) if isinstance(event, Vitals)]
    for event in vitals:  # one every two seconds
        assert all(0 < used <= 1.1 * peak for used, peak in zip(event.memory_bytes, event.peak_memory_bytes))
        assert len(event.memory_bytes) in (0, 3)


def test_report_and_state_show_it(log, capsys):
    state = RunState()
    for event in read(log):
        state.apply(event)
    [shown] = drawable(state)["findings"]
    run_report(log, output=None, trace=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["findings"] == [shown]
    assert (shown["rank"], shown["cause"], shown["over"]) == (SLOW, "compute", False)
    run_report(log, output=log.parent / "report.html", trace=None, as_json=False)
    assert "<b>compute</b>, since step " in (log.parent / "report.html").read_text()


def test_losses_are_bit_for_bit_the_same_without_a_log(tmp_path):
    with_log = run_ranks(3, train, str(tmp_path / "log.jsonl"), 12, 0.0)
    without = run_ranks(3, train, None, 12, 0.0)
    assert [losses.hex() for losses in with_log[0]] == [losses.hex() for losses in without[0]]
    assert with_log == without
