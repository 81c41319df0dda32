"""What a real run tells its log."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.elastic.crew import Crew, tell_step
from tests.ranks import run_ranks
from torch.utils.data import TensorDataset

import ragtag
from ragtag.watch.events import Began, Decided, Ended, Evaluated, Looped, Members, Planned, Said, Saved, Step, Verdict
from ragtag.watch.reader import Decoder, read

SOURCE = Path(__file__).parents[2] / "src"
DATA = TensorDataset(torch.linspace(-1, 1, 192).reshape(64, 3), torch.linspace(0, 1, 64).reshape(64, 1))


def loss_fn(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer_of(log: str | None = None, loss=loss_fn, **words) -> ragtag.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ragtag.Config(log=log, patience_s=10.0)
    return ragtag.Trainer(model, optimizer, loss, DATA, global_batch_size=12, config=config, **words)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def slow_on_the_last(trainer_rank: int):
    def loss(model, batch):
        time.sleep((0.004 if trainer_rank == 2 else 0.001) * len(batch[0]))
        return loss_fn(model, batch)

    return loss


def train_with_everything(directory: str):
    with trainer_of(f"{directory}/log.jsonl", slow_on_the_last(int(os.environ["RANK"]))) as trainer:
        reports = list(trainer.steps(24))
        score = trainer.evaluate(DATA, loss_fn)
        trainer.save(f"{directory}/a.safetensors")
        return reports, float(score), trainer.decisions


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded")
    results = run_ranks(3, train_with_everything, str(directory))
    return list(read(directory / "log.jsonl")), results[0]


def test_every_step_is_there_as_it_was_reported(recorded):
    events, (reports, _, _) = recorded
    steps = of(Step, events)
    assert [step.number for step in steps] == list(range(1, 25))
    for step, report in zip(steps, reports):
        assert (step.loss, step.samples, step.shares) == (report.loss, report.samples, report.shares)
        assert step.compute_s == pytest.approx(report.compute_s, abs=1e-6)
        assert step.wall_s == pytest.approx(report.wall_s, abs=1e-6)
        assert step.predicted_s == pytest.approx(report.predicted_s, abs=1e-6)
        for rank in range(3):
            assert step.wait_s[rank] + step.data_s[rank] == pytest.approx(report.wait_s[rank], abs=1e-5)
    assert sum(step.eta > 0 for step in steps) > 12, "speeds are known after some steps"
    assert all(step.eta < 3 for step in steps), "one slow step is no long-standing speed"
    assert sum(step.predicted_s > 0 for step in steps) > 12


def test_the_log_says_who_trained_under_which_plan_and_why_it_changed(recorded):
    events, (_, _, decisions) = recorded
    assert isinstance(events[0], Began)
    assert (events[0].global_batch_size, events[0].parameters, events[0].version) == (12, 4, ragtag.__version__)
    [members] = of(Members, events)
    assert len({member.name for member in members.ranks}) == 3
    [looped] = of(Looped, events)
    assert (looped.step, looped.last) == (0, 24)
    plans = of(Planned, events)
    assert plans[0].shares == (4, 4, 4)
    assert {step.plan for step in of(Step, events)} <= {plan.id for plan in plans}
    told = of(Decided, events)
    assert {(each.step, each.decided, each.reason) for each in told} == {
        (each.step, each.kind, each.reason) for each in decisions
    }
    first = [each for each in told if each.step == told[0].step]
    assert first[-1].achieved_step_s is not None, "what it achieved follows"
    assert first[-1].achieved_step_s == pytest.approx(decisions[0].achieved_step_s, abs=1e-6)


def test_evaluations_checkpoints_and_the_end_are_there(recorded):
    events, (_, score, _) = recorded
    assert [event.value for event in of(Evaluated, events)] == [score]
    [saved] = of(Saved, events)
    assert saved.path.endswith("a.safetensors")
    assert saved.step == 24
    [ended] = of(Ended, events)
    assert (ended.step, ended.reason) == (24, "")
    assert events[-1] == ended


def test_the_verdict_names_every_device(recorded):
    events, _ = recorded
    verdicts = of(Verdict, events)
    assert verdicts
    assert [worth.rank for worth in verdicts[-1].devices] == [0, 1, 2]
    assert verdicts[-1].devices[0].gain > 0, "one of two quick ones"


def test_shares_that_are_pinned_have_an_eta_too(tmp_path: Path):
    with trainer_of(str(tmp_path / "log.jsonl"), slow_on_the_last(2)) as trainer:
        list(trainer.steps(5))
    steps = of(Step, list(read(tmp_path / "log.jsonl")))
    assert all(step.eta > 0 for step in steps)
    assert 0.2 < statistics.median(step.eta for step in steps) < 1.2  # a single one by itself is the machine's


FAILS = """
import torch, ragtag
from torch.utils.data import TensorDataset
data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
model = torch.nn.Linear(2, 1)
trainer = ragtag.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1),
                         lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(), data, global_batch_size=4)
for report in trainer.steps(3):
    pass
{end}
"""


@pytest.mark.parametrize(
    ("end", "reason"),
    [("", ""), ("raise ValueError('bad luck')", "ValueError: bad luck"), ("trainer.close()", "")],
)
def test_a_script_that_ends_without_a_word_ends_its_log(tmp_path: Path, end, reason):
    script = tmp_path / "train.py"
    script.write_text(FAILS.format(end=end))
    log = tmp_path / "log.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "RAGTAG_LOG": str(log), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script)], env=environ, timeout=60, capture_output=True)
    events = list(read(log))
    assert [step.number for step in of(Step, events)] == [1, 2, 3]
    [ended] = of(Ended, events)
    assert (ended.step, ended.reason) == (3, reason)


def train_until_the_end(directory: Path):
    with trainer_of() as trainer:
        for report in trainer.steps(60):
            tell_step(report.number)
            time.sleep(0.02)


def test_with_a_hub_the_log_goes_on_when_its_first_rank_is_killed(tmp_path: Path):
    with Crew(tmp_path, patience_s=10.0, expected=3) as crew:
        for name in "abc":
            crew.start(name, train_until_the_end, tmp_path)
        crew.wait_for_step(20, "a", "b", "c")
        events = list(read(tmp_path / "log.jsonl"))
        first = of(Members, events)[0].ranks[0].name
        crew.signal(first)
        results = crew.results(*(name for name in "abc" if name != first))
        assert set(results.values()) == {None}, results
    decoder = Decoder()
    events = list(read(tmp_path / "log.jsonl", decoder))
    assert (decoder.skipped, decoder.unknown) == (0, 0)
    numbers = [step.number for step in of(Step, events)]
    missing = set(range(1, 61)) - set(numbers)
    # What the killed one had not written yet is less than a second of steps.
    assert len(missing) <= 30, sorted(missing)
    assert not missing or max(missing) - min(missing) < 30
    assert numbers[-1] == 60
    before, after = of(Members, events)[0], of(Members, events)[-1]
    assert len(before.ranks) == 3
    assert {member.name for member in after.ranks} == {member.name for member in before.ranks} - {first}
    assert any(event.source == "hub" and first in event.text for event in of(Said, events))


def test_settings_in_the_log_are_those_of_the_run(recorded):
    events, _ = recorded
    assert events[0].settings["patience_s"] == 10.0
    assert all(isinstance(value, (str, int, float, bool, type(None))) for value in events[0].settings.values())
