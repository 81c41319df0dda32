"""The live page of a run that this machine has started: its port, its address, and the process that serves it.

The one idea: the port belongs to the launcher, and the process is started when somebody knocks, so a page that nobody
looks at costs nothing, and one that was killed is back, behind the same address, for whoever tries again.
"""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ragtag.cli.listening import listening
from ragtag.cli.worker_process import die_with, say, signal_name
from ragtag.core.hub_address import written

_STARTS, _WITHIN_S = 5, 60.0


class PageProcess:
    """Listens at once; call `look_after` now and then, and `close`.

    Args:
        log: of the run; it may not be there yet.
        address: of this machine, where browsers come.
        port: 0: any.
        token: what a browser must know.
        environ: of the process.
        tell: says a line to the person at the terminal.

    Raises:
        LaunchError: the address is none of this machine's, or the port is taken.
    """

    def __init__(
        self,
        *,
        log: Path,
        address: str,
        port: int,
        token: str,
        environ: Mapping[str, str],
        tell: Callable[[str], None] = say,
    ) -> None:
        self._listener = listening(
            address,
            port,
            what="The page",
            advice="Choose another port (0: any), and an address of this machine (`ip -brief address` lists them).",
        )
        shown = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self.url = f"http://{written(shown, self._listener.getsockname()[1])}/?token={token}"
        """What to open in a browser."""
        self._environ = {**environ, "RAGTAG_TOKEN": token}
        self._command = [
            *(sys.executable, "-m", "ragtag.watch", "--log", str(log.absolute())),
            *("--fd", str(self._listener.fileno())),
        ]
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s: list[float] = []
        self._given_up = False

    @property
    def pid(self) -> int | None:
        """Of the process that serves the page; None: nobody has looked at it yet."""
        return None if self._process is None else self._process.pid

    def look_after(self, timeout_s: float = 0.0) -> None:
        """Start the process if somebody waits and none runs; with a timeout, wait so long for somebody."""
        if self._given_up or (self._process is not None and self._process.poll() is None):
            time.sleep(timeout_s)
            return
        waiting, _, _ = select.select([self._listener], [], [], timeout_s)
        if waiting:
            self._start()

    def close(self) -> None:
        """End the process; from now on nobody is answered at the page's address."""
        self._listener.close()
        if self._process is not None:
            self._process.kill()  # it only reads
            self._process.wait()

    def _start(self) -> None:
        now_s = time.monotonic()
        self._started_s = [each for each in self._started_s if now_s - each < _WITHIN_S]
        if self._process is not None and len(self._started_s) >= _STARTS:
            status = self._process.returncode
            how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
            self._tell(
                f"the page's process {how}, {_STARTS} times in {_WITHIN_S:.0f} s; the page is given up, the run goes on"
            )
            self._given_up = True
            self._listener.close()
            return
        self._started_s.append(now_s)
        self._process = subprocess.Popen(
            self._command,
            env=self._environ,
            pass_fds=(self._listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
