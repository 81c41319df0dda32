"""A worker that is frozen in any phase of a step is given up; when it wakes it ends soon, whoever is still there."""

import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ragtag.comm.standing import Evicted, HubLost, RunOver
from tests.elastic import hostile_cases
from tests.elastic.crew import Crew
from tests.elastic.hostile_cases import SINK, Case
from tests.elastic.test_elastic_training import PHASES, Fault, check, train
from tests.ranks import solo

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
PATIENCE_S = 3.0


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_is_frozen_in_any_phase(tmp_path: Path, phase: str) -> None:
    steps = 120
    reference = solo(train, None, steps)
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 5, phase, "stop"), steps, 0.05)
        crew.wait_for_step(10, "a", "c")
        crew.signal("b", signal.SIGCONT)
        woken = crew.results("b")["b"]
        assert "was given up and the others went on without it" in str(woken), woken
        for result in crew.results("a", "c").values():
            check(result, reference)
            assert result["generations"][-1][2] == 2


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_wakes_when_all_others_and_the_hub_are_gone_ends_within_the_patience(
    tmp_path: Path, phase: str
) -> None:
    """The hub's port still takes connections, as that of a frozen hub does, and nobody answers there."""
    steps = 12
    reference = solo(train, None, steps)
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 5, phase, "stop"), steps)
        for result in crew.results("a", "c").values():
            check(result, reference)
        assert crew.hub is not None
        crew.hub.wait(30.0)
        began_s = time.monotonic()
        crew.signal("b", signal.SIGCONT)
        woken = crew.results("b")["b"]
        told = "was given up and the others went on without it" in str(woken)  # these frames lay in its socket
        assert told or "has not been heard" in str(woken), woken
        assert time.monotonic() - began_s < PATIENCE_S + 3.0


def run_and_wake(crew: Crew, after_s: dict[str, float], timeout_s: float = 120.0) -> tuple[dict[str, Any], float]:
    """Wake each worker so many seconds after it was frozen. Return how all have ended, and the longest time from waking
    to the end of one that did not train on."""
    end_s, frozen_s, woken_s, longest_s = time.monotonic() + timeout_s, {}, {}, 0.0
    while (running := set(crew.workers) - set(crew.outcomes)) and time.monotonic() < end_s:
        for name in running - set(woken_s):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if psutil.Process(crew.workers[name].pid).status() != psutil.STATUS_STOPPED:
                    continue
                if time.monotonic() - frozen_s.setdefault(name, time.monotonic()) >= after_s[name]:
                    crew.signal(name, signal.SIGCONT)
                    woken_s[name] = time.monotonic()
        crew.hear(0.05)
        for name in woken_s.keys() & running & set(crew.outcomes):
            if crew.outcomes[name][0] != "value":
                longest_s = max(longest_s, time.monotonic() - woken_s[name])
    return crew.results(timeout=0.0), longest_s


@pytest.mark.parametrize("seed", range(20))
def test_workers_are_frozen_at_random_places(tmp_path: Path, seed: int) -> None:
    """For a part of the patience, which costs nobody his place, for longer, or until all others have ended."""
    luck = random.Random(seed)
    sink = SINK if seed % 3 == 0 else {**SINK, "arguments": {}}
    quiet = Case(steps=24, **sink)
    reference = solo(hostile_cases.train, quiet)
    (tmp_path / "quiet").mkdir()
    with Crew(tmp_path / "quiet", expected=2, patience_s=hostile_cases.PATIENCE_S) as crew:
        for name in "ab":
            crew.start(name, hostile_cases.train, quiet)
        been = crew.results()["b"]["been"]
    faults, after_s = [], {}
    for name in luck.sample("bcd", 2):
        place = luck.choice(sorted(set(been)))
        faults.append(hostile_cases.Fault(name=name, place=place, nth=luck.randint(1, been.count(place)), act="stop"))
        after_s[name] = luck.choice([0.3, 1.5, 6.0]) * hostile_cases.PATIENCE_S
    case = Case(steps=24, faults=tuple(faults), **sink)
    with Crew(tmp_path, expected=4, patience_s=hostile_cases.PATIENCE_S) as crew:
        for name in "abcd":
            crew.start(name, hostile_cases.train, case)
        results, longest_s = run_and_wake(crew, after_s)
    print(faults, after_s, {name: type(result).__name__ for name, result in results.items()}, f"{longest_s:.2f} s")
    assert longest_s < 3 * hostile_cases.PATIENCE_S
    hostile_cases.same(results["a"], reference)
    for name, result in results.items():
        if isinstance(result, dict):
            hostile_cases.same(result, reference, first=result["reports"][0][0])
        else:
            assert name in after_s, (name, result)
            assert isinstance(result, Evicted | RunOver | HubLost), (name, result)
