"""Worker processes as `ragtag launch` starts, signals and ends them, whether workers may come and go or not.

The one idea: a worker leads a process group of its own and dies with its launcher, so nothing is ever left behind, and
a Ctrl-C on the terminal reaches the launcher alone, which decides what its workers are told.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ragtag.cli.output import Output
from ragtag.core.errors import LaunchError

PEER_FAILED_STATUS = 75
"""As `comm.process_exit`: this worker ended because another one did."""
_PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True)
class Worker:
    """A process that was started."""

    rank: int
    """Its place on this machine, counted from 0; its rank where all ranks are started together."""
    process: subprocess.Popen[bytes]
    output: Output
    stopped_by_us: bool = False


def start_worker(
    command: tuple[str, ...],
    *,
    rank: int,
    environ: Mapping[str, str],
    output: Output,
    pass_fds: tuple[int, ...] = (),
) -> Worker:
    """Start Python with `command`; the one of rank 0 reads this terminal's standard input. Call `output.follow` next.

    Raises:
        LaunchError: the system could not start it.
    """
    environ = dict(environ)
    if output.stdout == subprocess.PIPE:
        # Into a pipe Python would write only every 8 KB.
        environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environ,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=output.stdout,
            stderr=output.stderr,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=die_with(os.getpid()),
        )
    except OSError as error:
        raise LaunchError(f"cannot start {sys.executable}: {error.strerror}.") from None
    return Worker(rank=rank, process=process, output=output)


def inherited(environ: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return what workers take over of the launcher's environment: nothing that would put them into another run."""
    shared = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    for name in ("RAGTAG_STORE_FD", "RAGTAG_EMULATE", "RAGTAG_HUB", "RAGTAG_GUEST"):
        shared.pop(name, None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_workers)))
    return shared


def kill(worker: Worker, number: int) -> None:
    """Signal the worker's whole process group: its loader workers too."""
    try:
        os.killpg(worker.process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def end(process: "subprocess.Popen[bytes] | None", within_s: float) -> None:
    """End a process of the launcher's own: SIGTERM, and SIGKILL if it takes longer."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with(launcher: int) -> Callable[[], None] | None:
    """Return what a child runs before its program: the kernel kills it when the launcher is gone, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)

    def ask_kernel() -> None:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGKILL)

    return ask_kernel


class ToldPatience:
    """A pipe on which workers that keep checkpoints say how long they may take to end."""

    def __init__(self) -> None:
        self._told, self.descriptor = os.pipe()
        os.set_blocking(self._told, False)
        self._longest_s = 0.0

    def close(self) -> None:
        """Close both ends."""
        os.close(self._told)
        os.close(self.descriptor)

    @property
    def variable(self) -> str:
        """What RAGTAG_LAUNCHER_PIPE is, for workers that inherit `descriptor`."""
        return f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"

    @property
    def longest_s(self) -> float:
        """The longest `patience_s` of workers that keep checkpoints; 0: none has said so."""
        try:
            said = os.read(self._told, 1 << 16).split()
        except BlockingIOError:
            said = []
        self._longest_s = max([self._longest_s, *map(float, said)])
        return self._longest_s


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(f"ragtag launch: {text}", file=sys.stderr, flush=True)
