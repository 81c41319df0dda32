"""A worker is lost at every place where a generation forms, and at random places of everything: only run when asked."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ragtag.comm.elastic import Evicted, RunOver
from tests.elastic.crew import Crew
from tests.elastic.hostile_cases import Case, Fault, same, train
from tests.ranks import solo

pytestmark = pytest.mark.long

SINK: dict[str, Any] = {
    "by_unit": True,
    "optimizer": "SGD",
    "settings": {"pull": True, "unit": 4, "check_replicas_every": 1},
    "arguments": {"loader": {"num_workers": 1, "multiprocessing_context": "fork"}},
}
FIRST = ("fingerprint", "broadcast", "values of rank N", "nature", "device kind", "ready")
JOINING = ("fingerprint", "nature", "brought", "state for newcomers", "broadcast", "ready", "sums of step N")
MOMENTS = ("before", "after")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
