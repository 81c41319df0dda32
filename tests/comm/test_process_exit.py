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
                if what == "system exit":
                    raise SystemExit(4)
                if what == "leave":
                    return
                if what in ("SIGINT", "SIGKILL"):
                    os.kill(os.getpid(), getattr(signal, what))
        group.wait(group.all_reduce(torch.ones(10)), "summing")
        group.exchange(b"vote")

train(sys.argv[1])
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    script = tmp_path_factory.mktemp("scripts") / "train.py"
    script.write_text(SCRIPT)
    words = ["fine", "raise 0", "raise 1", "exit", "system exit", "leave", "SIGINT", "SIGKILL"]
    environ = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fork_scripts.py")), "3", str(script), *words],
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
    assert statuses(ended["fine"]) == [0, 0, 0]
    assert [outcome["err"] for outcome in ended["fine"]] == ["", "", ""]


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_is_printed_where_it_happened_and_only_there(ended, culprit):
    outcomes = ended[f"raise {culprit}"]
    assert statuses(outcomes) == [1 if rank == culprit else 75 for rank in range(3)]
    printed = outcomes[culprit]["err"]
    assert printed.count("Traceback") == 1
    assert "ValueError: bad sample\n[ragtag] on rank" in printed
    assert "step 7, training" in printed
    assert [outcome["err"] for rank, outcome in enumerate(outcomes) if rank != culprit] == ["", ""]


@pytest.mark.parametrize(("word", "status"), [("exit", 3), ("SIGINT", 130)])
def test_asking_for_a_status_and_ctrl_c_are_quiet_and_reach_all(ended, word, status):
    assert statuses(ended[word]) == [75, status, 75]
    assert [outcome["err"] for outcome in ended[word]] == ["", "", ""]


@pytest.mark.parametrize(("word", "status"), [("leave", 0), ("system exit", 4), ("SIGKILL", -9)])
def test_who_leaves_without_an_error_is_reported_by_exactly_one_other(ended, word, status):
    outcomes = ended[word]
    assert outcomes.pop(1)["status"] == status
    assert sorted(statuses(outcomes)) == [1, 75]
    printing = [outcome["err"] for outcome in outcomes if outcome["status"] == 1]
    assert "PeerLost: Rank 1 (" in printing[0]
    assert [outcome["err"].count("PeerLost") for outcome in outcomes if outcome["status"] == 75] == [0]


@pytest.mark.parametrize("word", ["fine", "raise 0", "raise 1", "exit", "system exit", "leave", "SIGINT", "SIGKILL"])
def test_every_end_is_quick(ended, word):
    assert max(outcome["wall_s"] for outcome in ended[word]) < 10, "well before patience_s and before torch's 5 s"


def told(rank, hosts) -> Any:
    """Return a group of which only the hosts matter."""
    return SimpleNamespace(rank=rank, hosts=hosts)


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


def test_an_error_that_all_raise_is_printed_by_its_origin():
    error = DisagreementError("models differ")
    error.origin_rank = 2
    hosts = ("alpha", "beta", "beta")
    assert [what_to_print(error, told(rank, hosts)) for rank in range(3)] == ["line", "nothing", "all"]
