import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragtag.comm.process_exit import what_to_print
from ragtag.core.errors import DisagreementError, PeerFailed

SCRIPT = """
import os, signal, sys, torch
from ragtag.comm.rendezvous import connect

def train(what):
    group = connect(10.0)
    for step in range(1, 12):
        group.note(step, "training")
        if step == 7:
            if what == "raise 0" and group.rank == 0 or what == "raise 1" and group.rank == 1:
                raise ValueError("bad sample")
            if group.rank == 1:
                if what == "exit":
                    sys.exit(3)
                if what == "leave":
                    return
                if what == "SIGINT":
                    os.kill(os.getpid(), signal.SIGINT)
        group.wait(group.all_reduce(torch.ones(10)), "summing")
        group.exchange(b"vote")

train(sys.argv[1])
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    script = tmp_path_factory.mktemp("scripts") / "train.py"
    script.write_text(SCRIPT)
    runs = ["2:fine", "2:raise 0", "3:raise 1", "2:exit", "3:leave", "2:SIGINT"]
    environ = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fork_scripts.py")), str(script), *runs],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def statuses(outcomes):
    return [outcome["status"] for outcome in outcomes]


def test_a_script_that_ends_well_ends_in_silence(ended):
    assert statuses(ended["fine"]) == [0, 0]
    assert [outcome["err"] for outcome in ended["fine"]] == ["", ""]


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_is_printed_where_it_happened_and_only_there(ended, culprit):
    outcomes = ended[f"raise {culprit}"]
    assert statuses(outcomes) == [1 if rank == culprit else 75 for rank in range(len(outcomes))]
    printed = outcomes.pop(culprit)["err"]
    assert printed.count("Traceback") == 1
    assert "ValueError: bad sample\n[ragtag] on rank" in printed
    assert "step 7, training" in printed
    assert not any(outcome["err"] for outcome in outcomes)


@pytest.mark.parametrize(("word", "status"), [("exit", 3), ("SIGINT", 130)])
def test_asking_for_a_status_and_ctrl_c_are_quiet_and_reach_all(ended, word, status):
    assert statuses(ended[word]) == [75, status]
    assert [outcome["err"] for outcome in ended[word]] == ["", ""]


def test_who_leaves_without_an_error_is_reported_by_exactly_one_other(ended):
    outcomes = list(ended["leave"])
    assert outcomes.pop(1)["status"] == 0
    assert sorted(statuses(outcomes)) == [1, 75]
    printed = {outcome["status"]: outcome["err"] for outcome in outcomes}
    assert "PeerLost: Rank 1 (" in printed[1]
    assert printed[75] == ""


def test_every_end_is_quick(ended):
    slowest_s = max(outcome["wall_s"] for outcomes in ended.values() for outcome in outcomes)
    assert slowest_s < 30.0, "10 x patience_s would be 100 s"


def told(rank, hosts, failure=None) -> Any:
    """Return a group of which only the hosts and what it was told matter."""
    return SimpleNamespace(rank=rank, hosts=hosts, failure=failure)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), ["all"] * 4),
        (KeyboardInterrupt(), ["nothing"] * 4),
        (PeerFailed("x", rank=1), ["nothing", "all", "line", "nothing"]),
    ],
)
def test_a_person_reads_each_error_once_per_host(error, expected):
    hosts = ("alpha", "alpha", "beta", "beta")
    assert [what_to_print(error, told(rank, hosts)) for rank in range(4)] == expected


def test_the_same_mistake_on_every_rank_is_printed_by_the_first_that_told():
    error, hosts = ValueError("no such  file"), ("alpha", "alpha", "beta", "beta")
    first = PeerFailed("Rank 1 (alpha) failed at step 0: ValueError: no such file. Rank 0 ...", rank=1)
    printed = [what_to_print(error, told(rank, hosts, first)) for rank in range(4)]
    assert printed == ["nothing", "all", "line", "nothing"]
    assert what_to_print(ValueError("another"), told(0, hosts, first)) == "all"


def test_an_error_that_all_raise_is_printed_by_its_origin():
    error = DisagreementError("models differ")
    error.origin_rank = 2
    hosts = ("alpha", "beta", "beta")
    assert [what_to_print(error, told(rank, hosts)) for rank in range(3)] == ["line", "nothing", "all"]
