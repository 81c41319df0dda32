"""`ragtag demo`: four pretended devices, once with equal batches under stock DDP and once with ragtag.

The one idea: three trainings of the same steps, started one after the other as a user would start them (DDP, ragtag,
one process); the demo reads what they print, compares the models they leave, and draws both timelines.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from ragtag.cli.demo_exact import largest_parameter_difference
from ragtag.cli.demo_html import write_html
from ragtag.cli.demo_png import write_png
from ragtag.cli.demo_result import DemoDecision, DemoDevice, DemoResult, is_honest, judge, second_half
from ragtag.cli.demo_table import show
from ragtag.cli.demo_timeline import Timeline, timeline
from ragtag.cli.demo_training import Training, launch_command, progress_bars, train
from ragtag.core.cluster_file import load_cluster
from ragtag.core.errors import SettingError

_SHOWN_DDP_STEPS = 3
"""The picture shows as many seconds as so many of DDP's steps take."""

_DEVICES = (("desktop-1", 1), ("desktop-2", 1), ("laptop", 0.5), ("mini", 0.25))


class _Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is trained. `sample_ms` leaves room for the real work: about 7 ms a sample on one core, 2.75 devices on
    two cores."""

    steps: int
    batch: int
    sample_ms: float
    solo_steps: int


_FULL = _Size(steps=36, batch=44, sample_ms=40, solo_steps=5)
_QUICK = _Size(steps=8, batch=12, sample_ms=30, solo_steps=3)


def run_demo(
    *,
    steps: int | None,
    quick: bool,
    out: Path | None,
    as_json: bool,
    clock: Callable[[], float] = time.time,
) -> DemoResult:
    """Run the three trainings, write the pictures, and show the result; with `as_json`, as one JSON object.

    Raises:
        SettingError: the directory cannot be made.
        RagtagError: a training failed.
    """
    size = _QUICK if quick else _FULL
    size = msgspec.structs.replace(size, steps=steps or size.steps)
    started_s = clock()
    directory = _directory(out, started_s)
    cluster_file = directory / "cluster.toml"
    cluster_file.write_text(_toml(size))
    cluster = load_cluster(cluster_file)
    console = Console(stderr=as_json)
    console.print(
        f"This machine pretends to be {len(_DEVICES)} devices of speeds {', '.join(f'{s:g}' for _, s in _DEVICES)}, "
        f"and trains a small GPT on Python's own sources, {size.steps} steps of {size.batch} samples.",
        highlight=False,
    )
    with tempfile.TemporaryDirectory(prefix="ragtag-demo-") as temporary:
        models = {name: Path(temporary, f"{name}.safetensors") for name in ("ddp", "ragtag", "alone")}
        ddp, ours, alone = _train_all(size, cluster_file, models, Path(temporary, "meeting"), console)
        differences = {name: largest_parameter_difference(models[name], models["alone"]) for name in ("ddp", "ragtag")}
    solo = tuple(ddp.facts["solo_samples_per_s"])
    judged = {
        name: judge(
            title,
            training.rows,
            reference=alone.rows,
            parameter_difference=differences[name],
            cluster=cluster,
            solo_samples_per_s=solo,
        )
        for name, title, training in (("ddp", "stock DDP", ddp), ("ragtag", "ragtag", ours))
    }
    result = DemoResult(
        steps=size.steps,
        global_batch_size=size.batch,
        devices=tuple(
            DemoDevice(name=device.name, speed=device.speed, solo_samples_per_s=speed)
            for device, speed in zip(cluster.expanded(), solo)
        ),
        ddp=judged["ddp"],
        ragtag=judged["ragtag"],
        one_process_loss=alone.rows[-1].loss,
        speed_up=judged["ragtag"].samples_per_s / judged["ddp"].samples_per_s,
        speed_up_overall=judged["ddp"].wall_s / judged["ragtag"].wall_s,
        decisions=tuple(msgspec.convert(decision, DemoDecision) for decision in ours.facts["decisions"]),
        honest=is_honest(ddp.facts["honest"], judged["ddp"], judged["ragtag"]),
        total_s=clock() - started_s,
        files={
            "html": str(directory / "demo.html"),
            "png": str(directory / "demo.png"),
            "json": str(directory / "result.json"),
            "cluster": str(cluster_file),
        },
    )
    shown = _shown(ddp, ours)
    write_html(Path(result.files["html"]), result, shown, (ddp.rows, ours.rows))
    write_png(Path(result.files["png"]), result, shown)
    encoded = msgspec.json.encode(result)
    Path(result.files["json"]).write_bytes(msgspec.json.format(encoded))
    if as_json:
        print(encoded.decode())
    else:
        show(result, console)
    return result


def _train_all(
    size: _Size, cluster_file: Path, models: dict[str, Path], meeting: Path, console: Console
) -> tuple[Training, Training, Training]:
    common = ["--steps", str(size.steps), "--batch", str(size.batch)]
    ddp = ["-m", "ragtag.cli.demo_ddp", *common, "--solo-steps", str(size.solo_steps), "--meeting", str(meeting)]
    example = ["-m", "ragtag.examples.byte_gpt", *common, "--json"]
    emulated = launch_command("--emulate", str(cluster_file))
    with progress_bars(console) as progress:
        return (
            train(
                [*emulated, *ddp, "--save", str(models["ddp"])],
                title="stock DDP",
                steps=size.steps,
                progress=progress,
            ),
            train(
                [*emulated, *example, "--save", str(models["ragtag"])],
                title="ragtag",
                steps=size.steps,
                progress=progress,
            ),
            train(
                [sys.executable, *example, "--save", str(models["alone"])],
                title="one process",
                steps=size.steps,
                progress=progress,
            ),
        )


def _shown(ddp: Training, ours: Training) -> tuple[Timeline, Timeline]:
    """The last seconds of both, equally many."""
    halves = [second_half(training.rows) for training in (ddp, ours)]
    window_s = sum(row.wall_s for row in halves[0][-_SHOWN_DDP_STEPS:])
    ours_s = sum(row.wall_s for row in halves[1])
    window_s = min(window_s, ours_s)
    of_ddp, of_ours = (timeline(rows).last(window_s) for rows in halves)
    return of_ddp, of_ours


def _toml(size: _Size) -> str:
    lines = [
        "# Four pretended devices: ragtag launch --emulate cluster.toml train.py",
        "[emulate]",
        f"sample_ms = {size.sample_ms:g}  # forward and backward of one sample at speed 1",
        "optimizer_ms = 8",
    ]
    for name, speed in _DEVICES:
        lines += ["", "[[device]]", f"name = {json.dumps(name)}", f"speed = {speed:g}"]
    return "\n".join([*lines, ""])


def _directory(out: Path | None, now_s: float) -> Path:
    directory = out or Path("runs", time.strftime("demo-%Y%m%d-%H%M%S", time.localtime(now_s)))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out {directory}: {error.strerror}. Name a directory that can be written to.") from None
    return directory
