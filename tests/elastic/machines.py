"""Machines for tests: network namespaces on one switch, each with `ragtag launch` typed into it as a person would.

The one idea: a test sees what a person sees, the lines on each terminal, and what the workers have logged.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
NETNS = Path(__file__).parents[2] / "scripts" / "netns"
SCRIPT = Path(__file__).parent / "machine_script.py"
LONG_S = 45.0
"""More than anything takes on a busy machine."""


def wait_until(true: Callable[[], object], what: Callable[[], str] | str, timeout_s: float = LONG_S) -> float:
    """Return the seconds until `true` returned something true; fail with what `what` says."""
    began_s = time.monotonic()
    while not true():
        if time.monotonic() - began_s > timeout_s:
            pytest.fail(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.03)
    return time.monotonic() - began_s


class Machine:
    """One namespace, its address and host name, and the launch in it."""

    def __init__(self, name: str, number: int, directory: Path, patience_s: float) -> None:
        self.number, self.host, self.directory = number, ("home", "desk", "shed")[number], directory
        self.address = f"10.99.7.{10 + number}"
        self.namespace, self._bridge = f"{name}{number}", f"{name}-bridge"
        self._patience_s = patience_s
        self._num_launched = 0
        self._launch: subprocess.Popen[bytes] | None = None

    def type(self, *words: str | Path, token: str = "", **environ: str) -> None:
        """Start `ragtag launch WORDS SCRIPT DIRECTORY` here."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAGTAG_")}
        environ = (
            inherited
            | environ
            | {
                "PYTHONPATH": str(SOURCE),
                "OMP_NUM_THREADS": "1",
                "RAGTAG_HOSTNAME": self.host,
                "RAGTAG_PATIENCE_S": str(self._patience_s),
            }
        )
        if token:
            environ["RAGTAG_TOKEN"] = token
        self._num_launched += 1
        words = (*words, "--run-dir", self.directory / "journal") if "--hub" not in words else words
        with self._terminal.open("wb") as terminal:
            self._launch = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.namespace, sys.executable, "-m", "ragtag.cli.main", "launch"),
                    *(*map(str, words), str(SCRIPT), str(self.directory)),
                ],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
            )

    @property
    def _terminal(self) -> Path:
        return self.directory / f"terminal-{self.host}-{self._num_launched}"

    @property
    def terminal(self) -> str:
        """What is to be read here since the last launch."""
        return self._terminal.read_text()

    def line(self, part: str, timeout_s: float = LONG_S) -> str:
        """Wait for a line that holds `part`, and return it."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [line for line in self.terminal.splitlines() if part in line]
            return bool(found)

        wait_until(look, lambda: f"{part!r} on {self.host}:\n{self.terminal}", timeout_s)
        return found[0]

    def join_line(self) -> tuple[str, str]:
        """The token and the hub's address in the line to type elsewhere."""
        found = re.search(r"RAGTAG_TOKEN=(\S+) ragtag launch --hub (\S+) ", self.line("RAGTAG_TOKEN="))
        assert found is not None
        return found[1], found[2]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the launch alone."""
        assert self._launch is not None
        self._launch.send_signal(number)

    def status(self, timeout_s: float = LONG_S) -> int:
        """Wait for the launch's exit status."""
        assert self._launch is not None
        try:
            return self._launch.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.host} still runs after {timeout_s:g} s:\n{self.terminal}")

    def pull_cable(self) -> None:
        """Cut the link between this machine and the switch."""
        self._on_switch("set", f"port{self.number}", "down")

    def plug_in(self, switch: int = 0) -> None:
        """Give it back; `switch` 1 is another one, which is made when first needed."""
        if switch:
            self._on_switch("add", f"bridge{switch}", "type", "bridge", check=False)
            self._on_switch("set", f"bridge{switch}", "up")
        self._on_switch("set", f"port{self.number}", "master", f"bridge{switch}", "up")

    def _on_switch(self, *words: str, check: bool = True) -> None:
        subprocess.run(["ip", "-n", self._bridge, "link", *words], check=check, capture_output=True)

    def close(self) -> None:
        """End what runs here."""
        if self._launch is not None and self._launch.poll() is None:
            self._launch.kill()
            self._launch.wait()

    # What the workers have logged

    def steps(self, place: int | str = "*") -> dict[str, list[tuple[int, str, int]]]:
        """By worker process: the number, loss and number of ranks of each step it has committed."""
        return {
            file.stem: [
                (int(number), loss, int(ranks))
                for number, loss, ranks in map(str.split, file.read_text().split("\n")[:-1])
            ]
            for file in self.directory.glob(f"{self.host}-{place}.*.steps")
        }

    def newest(self, place: int = 0) -> tuple[int, str, int]:
        """The last step of the newest worker in this place."""
        return max((each[-1] for each in self.steps(place).values() if each), default=(0, "", 0))

    def reaches(self, *, ranks: int, steps: int = 5, timeout_s: float = LONG_S) -> float:
        """Wait until so many ranks together have committed several new steps here; return the seconds."""
        began = self.newest()[0]

        def reached() -> bool:
            last = max(self.steps(0).values(), key=lambda each: each[-1:], default=[])[-steps:]
            return len(last) == steps and last[0][0] > began and all(each[2] == ranks for each in last)

        return wait_until(
            reached, lambda: f"{ranks} ranks on {self.host}, which is at {self.newest()}:\n{self.terminal}", timeout_s
        )


def have_namespaces() -> bool:
    """Whether this system lets us make machines."""
    if not sys.platform.startswith("linux") or os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"el{os.getpid() % 100000}try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0
