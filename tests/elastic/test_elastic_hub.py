"""The hub is frozen, or killed at the worst moments: training needs it only where somebody comes or goes."""

import os
import signal
import time
from pathlib import Path

import pytest

from ragtag.comm.standing import HubLost
from tests.elastic.crew import Crew
from tests.elastic.test_elastic_training import Fault, check, train
from tests.ranks import solo

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
PATIENCE_S = 3.0
STEPS = 60


def test_a_hub_that_is_frozen_for_less_than_the_patience_costs_nobody_its_place(tmp_path: Path) -> None:
    reference = solo(train, None, STEPS)
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, None, STEPS, 0.05)
        crew.wait_for_step(5, *"abc")
        assert crew.hub is not None
        os.kill(crew.hub.pid, signal.SIGSTOP)
        time.sleep(PATIENCE_S / 2)
        os.kill(crew.hub.pid, signal.SIGCONT)
        for result in crew.results().values():
            check(result, reference)
            assert len(result["losses"]) == STEPS
            assert {ranks for _, _, ranks in result["generations"]} == {3}


def test_a_hub_that_stays_frozen_ends_all_within_the_patience(tmp_path: Path) -> None:
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, None, 1000, 0.05)
        crew.wait_for_step(5, *"abc")
        assert crew.hub is not None
        began_s = time.monotonic()
        os.kill(crew.hub.pid, signal.SIGSTOP)
        for result in crew.results().values():
            assert isinstance(result, HubLost), result
            assert f"the hub at 127.0.0.1:{crew.port} has not been heard (patience_s=3)" in str(result)
        assert time.monotonic() - began_s < 2 * PATIENCE_S + 3.0


@pytest.mark.parametrize("phase", ["reducing", "voted"])
def test_a_worker_is_killed_while_the_hub_is_away(tmp_path: Path, phase: str) -> None:
    """The others find out by themselves, wait for the hub, and go on when it has waited for the one that is gone."""
    reference = solo(train, None, STEPS)
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 20, phase), STEPS, 0.05)
        crew.wait_for_step(10, *"abc")
        crew.kill_hub()
        assert crew.results("b")["b"] == -signal.SIGKILL
        crew.start_hub()
        for result in crew.results("a", "c").values():
            check(result, reference)
            assert len(result["losses"]) == STEPS
            assert result["generations"][-1][2] == 2


@pytest.mark.parametrize("again", [1, 3])
def test_the_hub_is_killed_while_a_generation_forms(tmp_path: Path, again: int) -> None:
    """Right after a worker was lost, and again as soon as it has been started."""
    reference = solo(train, None, STEPS)
    with Crew(tmp_path, expected=3, patience_s=PATIENCE_S) as crew:
        for name in "abc":
            crew.start(name, train, Fault("b", 20, "backward"), STEPS, 0.05)
        assert crew.results("b")["b"] == -signal.SIGKILL
        for _ in range(again):
            crew.kill_hub()
            crew.start_hub()
            time.sleep(0.2)
        for result in crew.results("a", "c").values():
            check(result, reference)
            assert len(result["losses"]) == STEPS
            assert result["generations"][-1][2] == 2
