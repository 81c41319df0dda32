"""Slices of the model's state when ranks come, go and are killed, with real processes and a hub."""

import itertools
import signal
import time
from pathlib import Path

import pytest
import torch

import ragtag
from tests.elastic.crew import Crew, tell_step
from tests.ranks import solo
from tests.zero.models import Tokens, tiny
from tests.zero.test_zero_exact import adam, loss_fn

PATIENCE_S = 4.0
STEPS = 60


def train(layout, settings, pause_s):
    torch.set_num_threads(1)
    model = tiny()
    trainer = ragtag.Trainer(
        model,
        adam(model.parameters()),
        loss_fn,
        Tokens(),
        global_batch_size=12,
        clip_norm=1.0,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=9, gamma=0.8),
        config=ragtag.Config(layout=layout, patience_s=PATIENCE_S, micro_batch=3, **settings),
    )
    numbers = []
    for report in trainer.steps(STEPS):
        numbers.append(report.number)
        tell_step(report.number)
        time.sleep(pause_s)
    sharding = trainer._run.sharding
    whole = dict(model.named_parameters()) if sharding is None else sharding.parameters()
    result = numbers, {name: value.detach().clone() for name, value in whole.items()}
    trainer.close()
    return result


def assert_as_one(crew, *names):
    _, reference = solo(train, "replicated", {}, 0.0)
    results = crew.results(*names)
    whole = [values for _, values in results.values() if values]
    assert len(whole) >= 1, "rank 0 has all of them"
    for values in whole:
        for name, value in reference.items():
            assert (values[name] - value).abs().max() < 1e-9, name
    return {name: numbers for name, (numbers, _) in results.items()}


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_a_machine_joins_and_another_leaves_and_nothing_is_lost(tmp_path: Path, layout: str) -> None:
    with Crew(tmp_path, expected=2, patience_s=PATIENCE_S) as crew:
        for name in "ab":
            crew.start(name, train, layout, {}, 0.05)
        crew.wait_for_step(4, *"ab")
        crew.start("c", train, layout, {}, 0.05)
        crew.wait_for_step(8, "c")
        crew.signal("a", signal.SIGTERM)
        gone = crew.results("a")["a"]
        assert isinstance(gone, SystemExit), gone
        numbers = assert_as_one(crew, *"bc")
        assert numbers["b"] == list(range(1, STEPS + 1)), "no step comes twice"


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_rank_is_killed_and_the_run_goes_back_to_its_checkpoint(tmp_path: Path, layout: str) -> None:
    settings = {"checkpoint": str(tmp_path / "kept"), "checkpoint_every_steps": 6}
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, layout, settings, 0.03)
        crew.wait_for_step(10, *"abc")
        crew.signal("b", signal.SIGKILL)
        numbers = assert_as_one(crew, *"ac")
    for each in numbers.values():
        assert each[-1] == STEPS
        back = [(before, after) for before, after in itertools.pairwise(each) if after <= before]
        assert len(back) == 1, back
        assert back[0][1] % 6 == 1


def test_without_a_checkpoint_all_end_with_one_error(tmp_path: Path) -> None:
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, "zero2", {}, 0.03)
        crew.wait_for_step(5, *"abc")
        crew.signal("c", signal.SIGKILL)
        results = crew.results(*"ab")
        for result in results.values():
            assert "there is no checkpoint to go back to" in str(result), result


def test_killed_before_the_first_step_is_done(tmp_path: Path) -> None:
    settings = {"checkpoint": str(tmp_path / "kept"), "checkpoint_every_s": None}
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, "zero3", settings, 0.03)
        crew.wait_for_step(2, *"abc")
        crew.signal("a", signal.SIGKILL)
        assert_as_one(crew, *"bc")
