"""Starts one training as a process of its own and follows the lines of JSON that it prints.

The one idea: a training is known only by what it prints. A line with "step" is a step; any other line adds facts, of
which "doing" is shown at once. Whatever happens here, the process has ended before this returns.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ragtag.core.errors import RagtagError

_END_S = 4.0
"""How long `ragtag launch` may take to end its workers after Ctrl-C; it needs at most 3 s before it kills them."""
_SHOWN_LINES = 30


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one step printed; as `StepReport`, tuples by rank, seconds."""

    step: int
    loss: float
    wall_s: float
    shares: tuple[int, ...]
    compute_s: tuple[float, ...] = ()
    wait_s: tuple[float, ...] = ()
    comm_s: float = 0.0


@dataclass
class Training:
    """What a training printed."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def launch_command(*arguments: str) -> list[str]:
    """Return the command line of `ragtag launch`, with this Python."""
    return [sys.executable, "-m", "ragtag.cli.main", "launch", "--fixed", "--no-page", *arguments]


def progress_bars(console: Console) -> Progress:
    """Return bars for `train`, one line a training."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )


def train(
    command: Sequence[str], *, title: str, steps: int, progress: Progress, environ: Mapping[str, str] = os.environ
) -> Training:
    """Run `command` to its end, one thread a process, showing its steps as they come. Call from the main thread.

    Raises:
        RagtagError: it failed; what it wrote to standard error is shown before.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the process and its workers have ended (at most 5 s).
    """
    training = Training()
    task = progress.add_task(title, total=steps, status="starting")
    with tempfile.TemporaryFile() as errors:
        # A session of its own: Ctrl-C in a terminal reaches us alone, and we pass it on exactly once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={"OMP_NUM_THREADS": "1", **environ},
            start_new_session=True,
        )
        handler = signal.signal(signal.SIGTERM, _interrupt)
        try:
            assert process.stdout is not None
            started_s = 0.0
            for line in process.stdout:
                values = msgspec.json.decode(line)
                if "step" not in values:
                    training.facts.update(values)
                    if "doing" in values:
                        progress.update(task, status=values["doing"])
                    continue
                row = msgspec.convert(values, Row)
                started_s = started_s or time.perf_counter() - row.wall_s
                training.rows.append(row)
                speed = sum(row.shares) * len(training.rows) / (time.perf_counter() - started_s)
                progress.update(task, advance=1, status=_status(row, speed))
            status = process.wait()
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, handler)
        if status != 0:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
            progress.console.print("\n".join(lines[-_SHOWN_LINES:]), markup=False, highlight=False)
            raise RagtagError(f"the training '{title.strip()}' ended with status {status}; its own words are above.")
    return training


def _status(row: Row, samples_per_s: float) -> str:
    status = f"loss {row.loss:.3f} {samples_per_s:6.1f} samples/s"
    return f"{status}  shares {' '.join(map(str, row.shares))}" if len(row.shares) > 1 else status


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs: first as Ctrl-C would, then for good; its workers die with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
