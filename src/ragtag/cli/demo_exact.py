"""`ragtag demo --exact`: train the byte-level GPT on pinned, unequal shares, then in one process, and compare.

The one idea: nothing is staged. Both runs are the published example, started as a user would start it; the demo only
reads what they print and compares the two checkpoints they leave.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ragtag.cli.demo_training import Row, Training, launch_command, progress_bars, train

_EXAMPLE = "ragtag.examples.byte_gpt"


class ExactResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the two runs differ in; differences are norm-relative, the worst over all tensors."""

    steps: int
    global_batch_size: int
    shares: tuple[int, ...]
    loss_by_workers: float
    loss_by_one_process: float
    largest_loss_difference: float
    largest_parameter_difference: float
    samples_per_s_by_workers: float
    samples_per_s_by_one_process: float


def run_exact_demo(*, shares: Sequence[int], steps: int, double: bool, as_json: bool) -> ExactResult:
    """Run both trainings and show the comparison; with `as_json`, print the result as one JSON object instead."""
    console = Console(stderr=as_json)
    batch, listed = sum(shares), ",".join(map(str, shares))
    with tempfile.TemporaryDirectory(prefix="ragtag-demo-") as directory:
        workers_file, alone_file = Path(directory, "workers.safetensors"), Path(directory, "alone.safetensors")
        common = ["-m", _EXAMPLE, "--steps", str(steps), "--batch", str(batch), "--json"]
        common += ["--double"] if double else []
        with progress_bars(console) as progress:
            workers = train(
                [
                    *launch_command("--local", str(len(shares)), "--shares", listed),
                    *common,
                    "--save",
                    str(workers_file),
                ],
                title=f"{len(shares)} workers",
                steps=steps,
                progress=progress,
            )
            alone = train(
                [sys.executable, *common, "--save", str(alone_file)],
                title="one process",
                steps=steps,
                progress=progress,
            )
        result = ExactResult(
            steps=steps,
            global_batch_size=batch,
            shares=tuple(shares),
            loss_by_workers=workers.rows[-1].loss,
            loss_by_one_process=alone.rows[-1].loss,
            largest_loss_difference=largest_loss_difference(workers, alone),
            largest_parameter_difference=largest_parameter_difference(workers_file, alone_file),
            samples_per_s_by_workers=_samples_per_s(workers.rows),
            samples_per_s_by_one_process=_samples_per_s(alone.rows),
        )
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        _show(result, workers, alone, console)
    return result


def largest_loss_difference(training: Training, reference: Training) -> float:
    """Return the largest difference of a step's loss."""
    return max(abs(a.loss - b.loss) for a, b in zip(training.rows, reference.rows))


def largest_parameter_difference(file: Path, reference: Path) -> float:
    """Return the 2-norm of the difference relative to the reference's, of the tensor where it is largest."""
    from ragtag.checkpoint.file import load_file

    model, expected = load_file(file)["model"], load_file(reference)["model"]
    return max(
        float((model[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-300))
        for name, tensor in expected.items()
    )


def _samples_per_s(rows: Sequence[Row]) -> float:
    """Without the first step, which is slow for reasons of its own."""
    return sum(sum(row.shares) for row in rows[1:]) / sum(row.wall_s for row in rows[1:])


def _show(result: ExactResult, workers: Training, alone: Training, console: Console) -> None:
    table = Table(title="The same training, on unequal shares and in one process")
    table.add_column("")
    table.add_column(f"{len(result.shares)} workers, shares {', '.join(map(str, result.shares))}", justify="right")
    table.add_column("one process", justify="right")
    table.add_column("difference", justify="right")
    for number in sorted({1, result.steps // 2, result.steps} - {0}):
        ours, theirs = workers.rows[number - 1].loss, alone.rows[number - 1].loss
        table.add_row(f"loss at step {number}", f"{ours:.8f}", f"{theirs:.8f}", f"{abs(ours - theirs):.1e}")
    table.add_row(
        "samples/s", f"{result.samples_per_s_by_workers:.1f}", f"{result.samples_per_s_by_one_process:.1f}", ""
    )
    table.add_row("parameters, worst tensor (relative)", "", "", f"{result.largest_parameter_difference:.1e}")
    console.print(table)
