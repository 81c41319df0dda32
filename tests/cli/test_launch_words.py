"""Which kind of run the words of `ragtag launch` ask for, and where it writes about itself."""

import os
from pathlib import Path

import pytest

from ragtag.cli.elastic_request import is_elastic
from ragtag.cli.run_directory import LATEST, log_environ, make_run_directory
from ragtag.core.errors import SettingError


@pytest.mark.parametrize(
    ("wanted", "pinned", "joining", "elastic"),
    [
        (None, False, [], True),
        (None, True, [], False),
        (False, False, [], False),
        (True, False, [], True),
        (True, True, [], True),  # refused later, with the reason
        (None, False, ["--address"], True),
        (None, True, ["--hub"], True),
    ],
)
def test_a_run_is_elastic_unless_something_speaks_against_it(wanted, pinned, joining, elastic):
    assert is_elastic(wanted, pinned=pinned, joining=joining) is elastic


def test_a_fixed_run_that_others_join_is_a_contradiction():
    with pytest.raises(SettingError, match=r"--fixed is a run that nobody joins, and --address is for one that others"):
        is_elastic(False, pinned=False, joining=["--address", "--port"])


def test_every_launch_has_a_directory_and_the_newest_is_found_by_name():
    first, second = make_run_directory(None), make_run_directory(None)
    assert first.parent == second.parent == Path("runs")
    assert LATEST.resolve() == second.resolve()
    elsewhere = make_run_directory(Path("here/there"))
    assert elsewhere.is_dir()
    assert LATEST.resolve() == second.resolve(), "who names a directory finds it again"
    assert log_environ(elsewhere) == {"RAGTAG_LOG": f"{Path.cwd()}/here/there/log.jsonl"}
    assert log_environ(None) == {}
    assert sorted(os.listdir("runs")) == sorted({first.name, second.name, "latest"})


def test_a_place_that_cannot_be_made_is_named():
    Path("runs").write_text("a file")
    with pytest.raises(SettingError, match=r"The run's directory runs/run-.* cannot be made: .* --run-dir DIR"):
        make_run_directory(None)


def test_where_there_are_no_links_the_run_goes_on(monkeypatch):
    def refuse(self, target):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert make_run_directory(None).is_dir()
    assert not LATEST.exists()
