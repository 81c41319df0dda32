"""Where a run keeps what it writes about itself: its log, and the journal of its hub.

The one idea: every launch has a directory of its own under `runs`, and `runs/latest` is the newest one, so that nobody
has to name a directory in order to look at the run that goes on.
"""

import os
import time
from pathlib import Path

from ragtag.core.errors import SettingError

LOG_NAME = "log.jsonl"
LATEST = Path("runs/latest")


def make_run_directory(given: Path | None) -> Path:
    """Make the directory `given`, or a new one under `runs`, and return it.

    Raises:
        SettingError: it cannot be made here.
    """
    directory = given or Path("runs") / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"The run's directory {directory} cannot be made: {error.strerror}. Name one that can: --run-dir DIR."
        ) from None
    if given is None:
        _point_latest_at(directory)
    return directory


def _point_latest_at(directory: Path) -> None:
    """Best effort: not every file system has links, and two launches may do this at once."""
    new = LATEST.with_name(f".latest-{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(directory.name)
        new.replace(LATEST)
    except OSError:
        new.unlink(missing_ok=True)


def log_environ(directory: Path | None) -> dict[str, str]:
    """What tells a rank where the run's log is; nothing where the run has no directory."""
    return {} if directory is None else {"RAGTAG_LOG": str((directory / LOG_NAME).resolve())}
