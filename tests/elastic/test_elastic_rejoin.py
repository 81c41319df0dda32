"""What the launchers of two machines do about workers that are frozen, and about a launcher that is killed."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.elastic.machines import wait_until
from tests.elastic.test_elastic_leaving import launched, reaches

pytestmark = pytest.mark.long


@contextlib.contextmanager
def joined(directory: Path, home: Path) -> Iterator[psutil.Process]:
    """A second launch, in `directory`, that has joined the run of the one in `home`."""
    wait_until(lambda: "RAGTAG_TOKEN=" in (home / "terminal").read_text(), "no line to type elsewhere")
    found = re.search(r"RAGTAG_TOKEN=(\S+) ragtag launch --hub (\S+) ", (home / "terminal").read_text())
    assert found is not None
    directory.mkdir()
    with launched(directory, "--hub", found[2], "--token", found[1]) as launch:
        yield psutil.Process(launch.pid)


def test_a_worker_that_was_frozen_ends_when_it_wakes_and_another_one_joins_in_its_place(tmp_path: Path) -> None:
    with launched(tmp_path) as launch:
        reaches(tmp_path, 0, ranks=2)
        frozen = reaches(tmp_path, 1, ranks=2)
        os.kill(frozen, signal.SIGSTOP)
        reaches(tmp_path, 0, ranks=1)
        os.kill(frozen, signal.SIGCONT)
        reaches(tmp_path, 0, ranks=2)
        assert reaches(tmp_path, 1, ranks=2) != frozen
        (tmp_path / "enough").touch()
        status, text = launch.wait(30), (tmp_path / "terminal").read_text()
        assert status == 0, text
        said = re.search(r"no sign of life from (\S+)/1 \((\S+)\) for \S+ s .* frozen or unreachable", text)
        assert said is not None, text
        assert said[1] == said[2], "its host is named"
        assert "was given up and the others went on without it" in text
        assert "Traceback" not in text


def test_a_launcher_that_is_killed_takes_its_workers_along_and_the_others_go_on(tmp_path: Path) -> None:
    with launched(tmp_path, quiet=False) as launch:
        reaches(tmp_path, 0, ranks=2)
        with joined(tmp_path / "desk", tmp_path) as desk:
            reaches(tmp_path, 0, ranks=4)
            its_own = desk.children(recursive=True)
            assert len(its_own) >= 2
            desk.kill()
            reaches(tmp_path, 0, ranks=2)
            psutil.wait_procs(its_own, timeout=10.0)
            assert not [each for each in its_own if each.is_running()], "workers outlive their launcher"
        (tmp_path / "enough").touch()
        status, text = launch.wait(30), (tmp_path / "terminal").read_text()
        assert status == 0, text
        assert "Traceback" not in text
