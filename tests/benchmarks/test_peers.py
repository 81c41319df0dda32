"""`--peer` of the eta benchmark, without a peer installed: what is said then, and that each can be had by the extra."""

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def eta(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("eta")


def test_a_peer_that_is_not_installed_is_skipped_with_what_to_type_and_the_case_goes_on(eta, monkeypatch, capsys):
    measured = []

    def measure(name, arguments):
        measured.append((name, list(arguments.peer)))
        return {"case": name}

    monkeypatch.setattr(eta, "measure", measure)
    monkeypatch.setitem(eta.PEERS, "absent", eta.PEERS["accelerate"].__class__(module="not_there", start=print))
    monkeypatch.setattr(sys, "argv", ["eta.py", "--case", "quarter", "--json", "--peer", "absent"])
    eta.main()
    output = capsys.readouterr()
    assert measured == [("quarter", [])]
    assert json.loads(output.out) == [{"case": "quarter"}]
    assert output.err.startswith("absent skipped: not_there is not installed")
    assert "pip install -e '.[peers]'" in output.err
    assert ".venv-peers/bin/python benchmarks/eta.py" in output.err


def test_every_peer_has_a_loop_of_its_own_and_a_requirement_in_the_extra(eta):
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["peers"]
    required = {re.split(r"[<>=~!]", requirement)[0] for requirement in extra}
    assert {peer.module for peer in eta.PEERS.values()} == required
    assert len({peer.start for peer in eta.PEERS.values()}) == len(eta.PEERS)
    assert {name for name, peer in eta.PEERS.items() if peer.balances} == {"hivemind"}
