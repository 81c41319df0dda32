"""The hub of a run that this machine has started: its port, its process, and the line to type on other machines.

The one idea: the port belongs to the launcher, so a hub that is killed is started again behind the same address, and
whoever knocks meanwhile waits instead of being turned away.
"""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ragtag.cli.hub_question import ask
from ragtag.cli.listening import listening
from ragtag.cli.worker_process import die_with, end, say, signal_name
from ragtag.core.errors import LaunchError, SettingError
from ragtag.core.hub_address import is_loopback, written
from ragtag.hub.journal import FILE_NAME

_FINAL = (0, 1, 2, 74)
"""Statuses of a hub that would end the same way again: over, its own error, wrong settings, a damaged journal."""
_ENDS_S = 3.0
_PATIENT_WORDS_S = 5.0
_ASK_EVERY_S = 0.1
_COMES_BACK_S = 2.0
"""A worker whose connection broke has connected again after that time."""
_RESTARTS, _WITHIN_S = 5, 60.0


class HubProcess:
    """Listens at once; call `start`, then `look_after` now and then, and `close`.

    Args:
        address: of this machine, where workers come; port 0: any.
        directory: a new one, for the hub's journal.
        quiet: let it say only what goes wrong.
        outer: Unix socket of the process that merges islands; None: there is none.
        certificate, key: PEM files for TLS; None: connections are in the clear.
        island: what this site is called; None: it is not one of several.

    Raises:
        LaunchError: the address is none of this machine's, or the port is taken.
        SettingError: the directory holds an earlier run's journal.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        token: str,
        run: str,
        directory: Path,
        patience_s: float,
        environ: Mapping[str, str],
        quiet: bool = False,
        outer: str | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        island: str | None = None,
    ) -> None:
        if (directory / FILE_NAME).exists():
            raise SettingError(
                f"--run-dir {directory} holds the journal of an earlier start, and a hub's run is over when it ends. "
                f"Name a new directory or leave --run-dir out; training itself goes on from --checkpoint."
            )
        self.ended: int | None = None
        """Status of a hub that is not started again; None: it runs."""
        self._token, self._environ = token, environ
        self._listener = listening(
            address,
            port,
            what="The hub",
            advice="Give --address one of this machine's addresses (`ip -brief address` lists them) and --port a free "
            "port.",
        )
        port = self._listener.getsockname()[1]
        shown = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self.at = written(shown, port)
        """HOST:PORT for `--hub`."""
        bound: str = self._listener.getsockname()[0]
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
        self._patience_s = patience_s
        self.reached_here_at = written(own, port)
        """HOST:PORT on this machine."""
        self._private = is_loopback(address)
        self._command = [
            *(
                sys.executable,
                "-m",
                "ragtag.hub",
                "--quiet" if quiet else "--brief",
                "--fd",
                str(self._listener.fileno()),
                "--run",
                run,
            ),
            *("--run-dir", str(directory), "--patience", str(patience_s)),
            *(("--outer", outer) if outer is not None else ()),
            *(("--certificate", str(certificate)) if certificate is not None else ()),
            *(("--key", str(key)) if key is not None else ()),
        ]
        self._merges, self._island = outer is not None, island
        self.trusted = "" if certificate is None else str(certificate.resolve())
        """What workers of this machine trust; empty: connections are in the clear."""
        self._journal = directory / FILE_NAME
        self._had_journal = False
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s: list[float] = []

    def start(self) -> None:
        """Start the hub."""
        self._started_s.append(time.monotonic())
        self._process = subprocess.Popen(
            [*self._command, *(["--again"] if self._had_journal else [])],
            env={**self._environ, "RAGTAG_TOKEN": self._token},
            pass_fds=(self._listener.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )

    def join_line(self, command: tuple[str, ...]) -> str:
        """What to type elsewhere."""
        tls = "RAGTAG_TLS=hub.pem " if self.trusted else ""
        return f"{tls}RAGTAG_TOKEN={self._token} ragtag launch --hub {self.at} {shlex.join(command)}"

    def _island_line(self, command: tuple[str, ...]) -> str:
        """What to type at another site."""
        return self.join_line(command).replace(f"--hub {self.at} ", f"--hub {self.at} --island NAME ", 1)

    def say_how_to_join(self, command: tuple[str, ...]) -> None:
        """Print it."""
        if self._merges:
            say(f"this is the island {self._island}; other sites join with\n  {self._island_line(command)}")
        if self._private:
            say(
                f"more workers join from another terminal with\n  {self.join_line(command)}\n  "
                f"and from other machines if this is started with --address and one of this machine's addresses"
            )
        else:
            say(f"other machines join with\n  {self.join_line(command)}")

    def look_after(self) -> None:
        """Start it again if it was killed."""
        process = self._process
        self._had_journal = self._had_journal or self._journal.exists()
        if process is None or self.ended is not None or (status := process.poll()) is None:
            return
        recent = [each for each in self._started_s if time.monotonic() - each < _WITHIN_S]
        if status in _FINAL or len(recent) >= _RESTARTS:
            self.ended = status
            return
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        say(f"the hub (pid {process.pid}) {how}; starting it again")
        self.start()

    def await_end(self, signals: list[int], meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Return when no worker of any machine needs the hub any more, or a signal was noted.

        Args:
            meanwhile: called now and then; says whether islands may be on their way back.
        """
        began_s = empty_s = time.monotonic()
        told = False
        while self.ended is None and not signals:
            self.look_after()
            may_come_back = meanwhile()
            try:
                health = ask(self.reached_here_at, self._token, timeout_s=self._patience_s, trusted=self.trusted)
            except LaunchError:
                return
            now_s = time.monotonic()
            if health.connected:
                empty_s = now_s
            elif not may_come_back and (health.end or now_s - empty_s > _COMES_BACK_S):
                return
            if not told and now_s - began_s > _PATIENT_WORDS_S:
                say("workers on other machines still run, and the hub stays for them; Ctrl-C ends it")
                told = True
            time.sleep(_ASK_EVERY_S)

    def close(self) -> None:
        """End the hub; from now on nobody is answered at its address."""
        end(self._process, _ENDS_S)
        self._listener.close()
