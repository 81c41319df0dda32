"""A worker is lost at every place where a generation forms, and at random places of everything: only run when asked."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ragtag.comm.standing import Evicted, RunOver
from tests.elastic.crew import Crew
from tests.elastic.hostile_cases import (
    SINK,
    Case,
    Data,
    Fault,
    cross_entropy,
    network,
    places,
    same,
    sample,
    train,
    trainer_of,
)
from tests.ranks import solo

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

FIRST = ("fingerprint", "broadcast", "values of rank N", "nature", "device kind", "ready")
JOINING = ("fingerprint", "nature", "brought", "state for newcomers", "broadcast", "ready", "sums of step N")
MOMENTS = ("before", "after")


def outcome_is_sound(name: str, result: Any, reference: dict[str, Any]) -> None:
    """A survivor has trained what it saw exactly; others were killed, given up, or came too late."""
    if isinstance(result, dict):
        same(result, reference, first=result["reports"][0][0])
    else:
        assert result == -signal.SIGKILL or isinstance(result, Evicted | RunOver), (name, result)


def run(directory: Path, case: Case, first: str, then: str = "", *, joins_at: int = 3) -> dict[str, Any]:
    with Crew(directory, expected=len(first), patience_s=4.0) as crew:
        for name in first:
            crew.start(name, train, case)
        if then:
            crew.wait_for_step(joins_at, "a")
        for name in then:
            crew.start(name, train, case)
        return crew.results(timeout=60.0)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("place", FIRST)
def test_the_first_generation_loses_a_worker(tmp_path: Path, place: str, moment: str) -> None:
    case = Case(steps=8, faults=(Fault(name="b", place=f"{moment} {place}"),))
    reference = solo(train, Case(steps=8))
    results = run(tmp_path, case, "abc")
    assert results["b"] == -signal.SIGKILL
    for name in "ac":
        same(results[name], reference)


@pytest.mark.parametrize("who", ["b", "d"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("place", JOINING)
def test_a_generation_with_newcomers_loses_a_worker(tmp_path: Path, place: str, moment: str, who: str) -> None:
    """`b` passes the first three places, and the broadcast twice, in the first generation too."""
    nth = {"fingerprint": 2, "nature": 2, "broadcast": 3}.get(place, 1) if who == "b" else 1
    if who == "b" and place == "ready":
        pytest.skip("veterans are ready")
    fault = Fault(name=who, place=f"{moment} {place}", nth=nth)
    case = Case(steps=50, pause_s=0.15, until="e", faults=(fault,), by_unit=True)
    reference = solo(train, Case(steps=50, by_unit=True))
    results = run(tmp_path, case, "abc", "de")
    assert results[who] == -signal.SIGKILL
    for name, result in results.items():
        outcome_is_sound(name, result, reference)
    for name in "ac":
        assert len(results[name]["reports"]) == 50


@pytest.mark.parametrize("seed", range(30))
def test_workers_are_lost_at_random_places(tmp_path: Path, seed: int) -> None:
    luck = random.Random(seed)
    sink = SINK if seed % 3 == 0 else {**SINK, "arguments": {}}
    quiet = Case(steps=24, **sink)
    reference = solo(train, quiet)
    (tmp_path / "quiet").mkdir()
    been = run(tmp_path / "quiet", quiet, "ab")["b"]["been"]
    faults = []
    for name in luck.sample("bcdef", 3):
        place = luck.choice(sorted(set(been)))
        faults.append(Fault(name=name, place=place, nth=luck.randint(1, been.count(place))))
    case = Case(steps=24, pause_s=0.1, until="f", faults=tuple(faults), **sink)
    (tmp_path / "disturbed").mkdir()
    results = run(tmp_path / "disturbed", case, "abcd", "ef", joins_at=2)
    print(faults, {name: type(result).__name__ for name, result in results.items()})
    for name, result in results.items():
        outcome_is_sound(name, result, reference)
    same(results["a"], reference)


def slow_in_the_body(case: Case) -> Any:
    """Worker `b` takes longer than the patience between two steps, and what `a` raises then ends all."""
    model = network(False)
    with places(case.faults):
        trainer = trainer_of(model, patience_s=2.0)
        for report in trainer.steps(case.steps):
            if report.number == 4 and os.environ.get("RAGTAG_WORKER") == "b":
                time.sleep(5.0)
            if report.number == 8 and os.environ.get("RAGTAG_WORKER") == "a" and case.settings.get("fails"):
                raise ValueError("a mistake of the script")
        trainer.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_is_lost_while_another_one_runs_the_script(tmp_path: Path, fails: bool) -> None:
    case = Case(steps=10, faults=(Fault(name="c", place="before exchanging votes", nth=5),), settings={"fails": fails})
    reference = solo(slow_in_the_body, Case(steps=10))
    with Crew(tmp_path, expected=3, patience_s=2.0) as crew:
        for name in "abc":
            crew.start(name, slow_in_the_body, case)
        results = crew.results()
        assert results["c"] == -signal.SIGKILL
        for name in "ab":
            if fails:
                assert "a mistake of the script" in str(results[name])
            else:
                for one, other in zip(results[name], reference):
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


class Slow:
    """Takes 2 ms a sample, and once much longer on worker `b`."""

    number = 0

    def __len__(self) -> int:
        return len(Data(False))

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        if self.number == 9 and os.environ.get("RAGTAG_WORKER") == "b":
            self.number = -1
            time.sleep(1.0)
        return sample(index)


def stall_for_a_while(case: Case) -> Any:
    model, data = network(False), Slow()

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.003 * len(batch[0]))
        return cross_entropy(model, batch)

    with places(case.faults):
        trainer = trainer_of(model, torch.optim.AdamW, loss_fn, data, settings={"check_replicas_every": 1})
        stood_in, reports = False, []
        for report in trainer.steps(24):
            data.number = report.number + 1 if data.number >= 0 else -1
            stood_in |= bool(trainer._run.absent)
            reports.append((report.number, report.loss))
        trainer.close()
    return [p.detach().clone() for p in model.parameters()], reports, stood_in


@pytest.mark.parametrize("place", ["before apply", "before voting", "after voting", "before exchanging votes"])
@pytest.mark.parametrize("nth", [9, 10, 12])
def test_a_worker_is_lost_while_a_stand_in_acts_for_another_one(tmp_path: Path, place: str, nth: int) -> None:
    nth = 2 * nth if place == "before exchanging votes" else nth  # replicas are compared too
    values, expected, _ = solo(stall_for_a_while, Case())
    case = Case(faults=(Fault(name="c", place=place, nth=nth),))
    with Crew(tmp_path, expected=4, patience_s=4.0) as crew:
        for name in "abcd":
            crew.start(name, stall_for_a_while, case)
        results = crew.results()
        assert results["c"] == -signal.SIGKILL
        for name in "abd":
            assert isinstance(results[name], tuple), results
            assert [number for number, _ in results[name][1]] == [number for number, _ in expected]
            losses = [loss for _, loss in results[name][1]]
            assert losses == pytest.approx([loss for _, loss in expected], abs=1e-9)
            for one, other in zip(results[name][0], values):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        print([results[name][2] for name in "abd"])
