from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _runs_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch makes a directory under `runs`, where it is started."""
    monkeypatch.chdir(tmp_path)
