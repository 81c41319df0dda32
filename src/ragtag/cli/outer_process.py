"""The process that merges what islands send, beside the hub of the site that has started the run.

The one idea: its socket belongs to the launcher, so it is started again behind the same path when it was killed, and
islands wait meanwhile; only the hub, which has checked the token, connects to it.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ragtag.cli.worker_process import die_with, end, say, signal_name

_FINAL = (0, 1, 2, 74)
"""Statuses that would come again: its end, its own error, wrong settings, a damaged journal."""
_ENDS_S = 3.0
_COMES_BACK_S = 15.0
"""Islands try again every two seconds; starting takes some."""
_RESTARTS, _WITHIN_S = 5, 60.0


class OuterProcess:
    """Listens at once, at `path`; call `start`, then `look_after` now and then, and `close`.

    Args:
        run: name of the run.
        directory: of the run, where values and journal lie.
        quiet: let it say only what goes wrong.
    """

    def __init__(
        self, *, run: str, directory: Path, patience_s: float, environ: Mapping[str, str], quiet: bool = False
    ) -> None:
        # A run's directory may be too deep for the name of a Unix socket.
        self._directory = tempfile.TemporaryDirectory(prefix="ragtag-")
        self.path = f"{self._directory.name}/outer"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._environ = environ
        self._command = [
            *(sys.executable, "-m", "ragtag.outer", "--fd", str(self._listener.fileno()), "--run", run),
            *("--run-dir", str(directory), "--patience", str(patience_s), *(["--quiet"] if quiet else [])),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s: list[float] = []
        self._ended = False

    def start(self) -> None:
        """Start it."""
        self._started_s.append(time.monotonic())
        self._process = subprocess.Popen(
            self._command,
            env=dict(self._environ),
            pass_fds=(self._listener.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )

    def look_after(self) -> bool:
        """Start it again if it was killed; return whether that is so short ago that islands may be coming back."""
        process = self._process
        if process is None or self._ended:
            return False
        if (status := process.poll()) is None:
            return len(self._started_s) > 1 and time.monotonic() - self._started_s[-1] < _COMES_BACK_S
        recent = [each for each in self._started_s if time.monotonic() - each < _WITHIN_S]
        if status in _FINAL or len(recent) >= _RESTARTS:
            self._ended = True
            say(f"the outer loop (pid {process.pid}) ended with status {status}; islands go on, each by itself")
            return False
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        say(f"the outer loop (pid {process.pid}) {how}; starting it again")
        self.start()
        return True

    def close(self) -> None:
        """End it."""
        end(self._process, _ENDS_S)
        self._listener.close()
        self._directory.cleanup()
