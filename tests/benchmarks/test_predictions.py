"""The predictions benchmark without measuring: its clusters are valid, and its summary counts what it should."""

import importlib
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from ragtag.cli.cluster_toml import to_toml
from ragtag.core.cluster import Cluster, Device
from ragtag.core.cluster_file import load_cluster
from ragtag.cost.candidate import Candidate, Part

ROOT = Path(__file__).parents[2]


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("predictions")


def test_every_cluster_can_be_read_and_written(predictions, tmp_path):
    for name, case in predictions.CASES.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(case.text)
        described = load_cluster(file)
        file.write_text(to_toml(described))
        assert load_cluster(file) == described
        assert len({device.host for device in described.expanded()}) == 1 or case.rate or described.links


def test_errors_are_summed_up_by_kind_of_cluster_and_source(predictions):
    rows = [
        {"cluster": "four", "what": "chosen", "error": -0.02},
        {"cluster": "four", "what": "even", "error": 0.06},
        {"cluster": "four", "what": "even, simulated", "error": 0.01},
        {"cluster": "four", "what": "device3 adds", "predicted": 0.10, "achieved": 0.13},
        {"cluster": "link", "what": "chosen", "error": 0.04},
        {"cluster": "tbf", "what": "chosen", "error": 0.1},
    ]
    assert predictions.summary(rows) == {
        "emulated, predicted": {"median": 0.04, "worst": 0.06, "target": [0.05, 0.12]},
        "emulated, simulated": {"median": 0.01, "worst": 0.01, "target": [0.05, 0.12]},
        "tbf, predicted": {"median": 0.1, "worst": 0.1, "target": [0.08, 0.20]},
        "verdicts": {"worst_points": 3.0, "target": 5},
    }


def test_the_size_that_limits_a_rank_is_the_runs_own(predictions):
    def candidate(*parts):
        return Candidate(
            name="x",
            layout="replicated",
            parts=tuple(
                Part(device=str(n), samples=samples, micro_batch=size) for n, (samples, size) in enumerate(parts)
            ),
        )

    assert predictions.common_micro_batch(candidate((8, 8), (3, 3))) is None
    assert predictions.common_micro_batch(candidate((8, 4), (3, 4))) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_hosts_become_namespaces_that_reach_each_other_and_go_again(predictions):
    described = Cluster(devices=(Device(name="a"), Device(name="b"), Device(name="c", host="away")))
    try:
        with predictions.namespaces(described, "200mbit") as where:
            assert list(where) == ["localhost", "away"]
            limits = subprocess.run(
                ["ip", "netns", "exec", where["away"], "tc", "qdisc", "show", "dev", "eth0"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            assert "tbf" in limits
            assert "200Mbit" in limits
    except subprocess.CalledProcessError as error:
        if error.cmd[1:2] == ["up"]:
            pytest.skip("this machine makes no network namespaces")
        raise
    assert not any(Path("/run/netns", name).exists() for name in where.values())
    with predictions.namespaces(described, "") as where:
        assert where == {}
