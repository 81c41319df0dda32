"""`ragtag demo`: train the byte-level GPT on unequal shares, then in one process, and put both side by side.

The one idea: nothing is staged. Both runs are the published example, started as a user would start it; the demo only
reads what they print and compares the two checkpoints they leave.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragtag.core.errors import RagtagError

_EXAMPLE = "ragtag.examples.byte_gpt"


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo found; differences are norm-relative, the worst over all tensors."""

    steps: int
    global_batch_size: int
    shares: tuple[int, ...]
    loss_by_workers: float
    loss_by_one_process: float
    largest_loss_difference: float
    largest_parameter_difference: float
    samples_per_s_by_workers: float
    samples_per_s_by_one_process: float


@dataclass(frozen=True)
class _Outcome:
    losses: list[float]
    seconds: list[float]
    checkpoint: Path


def run_demo(*, shares: Sequence[int], steps: int, double: bool, as_json: bool) -> DemoResult:
    """Run both trainings and show the comparison; with `as_json`, print the result as one JSON object instead."""
    console = Console(stderr=as_json)
    batch = sum(shares)
    with tempfile.TemporaryDirectory(prefix="ragtag-demo-") as directory:
        common = ["--steps", str(steps), "--batch", str(batch), "--json", *(["--double"] if double else [])]
        launch = [sys.executable, "-m", "ragtag.cli.main", "launch", "--local", str(len(shares))]
        listed = ",".join(map(str, shares))
        unequal = _train(
            [*launch, "--shares", listed, "-m", _EXAMPLE, *common],
            Path(directory, "workers.safetensors"),
            f"{len(shares)} workers, shares {listed}",
            steps,
            console,
        )
        alone = _train(
            [sys.executable, "-m", _EXAMPLE, *common],
            Path(directory, "alone.safetensors"),
            "one process",
            steps,
            console,
        )
        result = DemoResult(
            steps=steps,
            global_batch_size=batch,
            shares=tuple(shares),
            loss_by_workers=unequal.losses[-1],
            loss_by_one_process=alone.losses[-1],
            largest_loss_difference=max(abs(a - b) for a, b in zip(unequal.losses, alone.losses)),
            largest_parameter_difference=_largest_difference(unequal.checkpoint, alone.checkpoint),
            samples_per_s_by_workers=batch * (steps - 1) / sum(unequal.seconds[1:]),
            samples_per_s_by_one_process=batch * (steps - 1) / sum(alone.seconds[1:]),
        )
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        _show(result, unequal, alone, console)
    return result


def _train(command: list[str], checkpoint: Path, title: str, steps: int, console: Console) -> _Outcome:
    """Run one training as a process of its own, showing its steps as they come."""
    losses: list[float] = []
    seconds: list[float] = []
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    process = subprocess.Popen([*command, "--save", str(checkpoint)], stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(f"{title:26}", total=steps, status="starting")
            started = time.perf_counter()
            for line in process.stdout:
                row = json.loads(line)
                losses.append(row["loss"])
                seconds.append(row["wall_s"])
                speed = sum(row["shares"]) * len(losses) / (time.perf_counter() - started)
                progress.update(task, advance=1, status=f"loss {row['loss']:.4f}  {speed:6.1f} samples/s")
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        raise RagtagError(f"the training '{title}' ended with status {status}; its own message is above.")
    return _Outcome(losses, seconds, checkpoint)


def _largest_difference(ours: Path, theirs: Path) -> float:
    from ragtag.checkpoint.file import load_file

    model, reference = load_file(ours)["model"], load_file(theirs)["model"]
    return max(
        float((model[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-300))
        for name, tensor in reference.items()
    )


def _show(result: DemoResult, unequal: _Outcome, alone: _Outcome, console: Console) -> None:
    table = Table(title="The same training, on unequal shares and in one process")
    table.add_column("")
    table.add_column(f"{len(result.shares)} workers, shares {', '.join(map(str, result.shares))}", justify="right")
    table.add_column("one process", justify="right")
    table.add_column("difference", justify="right")
    for number in sorted({1, result.steps // 2, result.steps} - {0}):
        ours, theirs = unequal.losses[number - 1], alone.losses[number - 1]
        table.add_row(f"loss at step {number}", f"{ours:.8f}", f"{theirs:.8f}", f"{abs(ours - theirs):.1e}")
    table.add_row(
        "samples/s", f"{result.samples_per_s_by_workers:.1f}", f"{result.samples_per_s_by_one_process:.1f}", ""
    )
    table.add_row("parameters, worst tensor (relative)", "", "", f"{result.largest_parameter_difference:.1e}")
    console.print(table)
