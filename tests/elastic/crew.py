"""Runs a training function as workers of an elastic run: a real hub, real processes, and faults in between.

The one idea: a worker is a process that can be started and killed at any time; what it returns, and how it ended, is
kept by its name.
"""

import faulthandler
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from ragtag.comm import process_exit
from tests.ranks import _context, _pickled


class Crew:
    """A hub and its workers. Use as a context manager: nothing outlives it."""

    def __init__(self, directory: Path, *, patience_s: float = 5.0, expected: int = 1) -> None:
        self.directory, self.patience_s, self.expected = directory, patience_s, expected
        self.token = secrets.token_hex(8)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.port = self.listener.getsockname()[1]
        self.workers: dict[str, Any] = {}
        self.outcomes: dict[str, tuple[str, Any]] = {}
        self._pipes: dict[Any, str] = {}
        self.hub: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Crew":
        self.start_hub()
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.workers.values():
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        if self.hub is not None:
            self.hub.kill()
            self.hub.wait()
        self.listener.close()

    def start_hub(self) -> None:
        """Start the hub, or start it again."""
        self.hub = subprocess.Popen(
            [
                *(sys.executable, "-m", "ragtag.hub", "--fd", str(self.listener.fileno()), "--run", "test"),
                *("--run-dir", str(self.directory), "--patience", str(self.patience_s)),
            ],
            env={**os.environ, "RAGTAG_TOKEN": self.token},
            pass_fds=(self.listener.fileno(),),
        )

    def kill_hub(self) -> None:
        """SIGKILL it."""
        assert self.hub is not None
        self.hub.kill()
        self.hub.wait()

    def start(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Start a worker called `name` that runs `function(*args)`."""
        receiving, answer = _context.Pipe(duplex=False)
        environ = {
            "RAGTAG_HUB": f"127.0.0.1:{self.port}",
            "RAGTAG_TOKEN": self.token,
            "RAGTAG_RUN": "test",
            "RAGTAG_WORKER": name,
            "CREW_DIRECTORY": str(self.directory),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(self.expected),
        }
        process = _context.Process(target=_run_worker, args=(environ, answer, function, args), daemon=False)
        process.start()
        answer.close()
        self.workers[name] = process
        self._pipes[receiving] = name

    def signal(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a worker a signal; nothing if it has ended: its pid may be somebody else's by now."""
        if self.workers[name].is_alive():
            os.kill(self.workers[name].pid, number)

    def wait_for_step(self, step: int, *names: str, timeout: float = 60.0) -> None:
        """Return when each of these workers has told, with `tell_step`, that it is that far."""
        end_s = time.monotonic() + timeout
        for name in names:
            while self._step_of(name) < step:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{name} is at step {self._step_of(name)} after {timeout:g} s")
                time.sleep(0.01)

    def _step_of(self, name: str) -> int:
        file = self.directory / f"{name}.step"
        return int(file.read_text() or 0) if file.exists() else 0

    def results(self, *names: str, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for these workers (none: all) and return what they returned, or their errors."""
        wanted = set(names or self.workers)
        end_s = time.monotonic() + timeout
        while missing := wanted - set(self.outcomes):
            if not self.hear(max(0.0, end_s - time.monotonic())):
                self._show_stacks(missing)
                raise TimeoutError(f"{sorted(missing)} still run after {timeout:g} s")
        return {name: self.outcomes[name][1] for name in names or self.workers}

    def hear(self, timeout_s: float) -> bool:
        """Note how workers have ended; False: none has ended within `timeout_s` seconds."""
        readable = wait(list(self._pipes), timeout_s)
        for pipe in readable:
            name = self._pipes.pop(pipe)
            try:
                self.outcomes[name] = pickle.loads(pipe.recv_bytes())  # pyright: ignore
            except EOFError:
                self.workers[name].join(5.0)
                self.outcomes[name] = ("died", self.workers[name].exitcode)
        return bool(readable)

    def _show_stacks(self, names: set[str]) -> None:
        """Let these workers write to standard error where each of their threads is."""
        for name in names:
            self.signal(name, signal.SIGUSR1)
        time.sleep(0.5)


def tell_step(step: int) -> None:
    """In a worker: this far it is."""
    if directory := os.environ.get("CREW_DIRECTORY"):
        Path(directory, f"{os.environ['RAGTAG_WORKER']}.step").write_text(str(step))


def _run_worker(environ: dict[str, str], answer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environ)
    os.environ["RANK"] = "0"  # for messages of this harness only
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)
    torch.set_num_threads(1)
    try:
        outcome = pickle.dumps(("value", function(*args)))
    except SystemExit as error:  # which no exception hook sees
        outcome = _pickled(error)
    except BaseException as error:
        process_exit.report(error)
        outcome = _pickled(error)
    process_exit.finish()
    answer.send_bytes(outcome)
    answer.close()
