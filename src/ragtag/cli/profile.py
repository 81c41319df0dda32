"""`ragtag profile`: run a script's workers, which measure where they would train, and show what they found.

The one idea: the script is run as `launch` runs it; an environment variable tells its `Trainer` to measure and end.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ragtag.cli.launch import Request, launch_local
from ragtag.core.errors import RagtagError, SettingError
from ragtag.core.profile import DeviceProfile, Profile, load_profile
from ragtag.core.quantities import format_bandwidth, format_bytes


def run_profile(
    request: Request, *, output: Path, fresh: bool, as_json: bool, environ: Mapping[str, str] = os.environ
) -> int:
    """Measure, write the profile to `output` and show it; return the exit status, that of the workers if they failed.

    Raises:
        SettingError: `output` cannot be written.
        RagtagError: the script ended without building a `Trainer`.
    """
    _check_writable(output)
    before = _stamp(output)
    environ = {**environ, "RAGTAG_PROFILE": str(output.absolute())}
    for name in ("RAGTAG_PROFILE_FRESH", "RAGTAG_PROFILE_FACTS"):
        environ.pop(name, None)
    if fresh:
        environ["RAGTAG_PROFILE_FRESH"] = "1"
    with _standard_output_to_errors() if as_json else _as_it_is():
        status = launch_local(request, environ=environ)
    if status != 0:
        return status
    if _stamp(output) == before:
        raise RagtagError(no_trainer(request))
    profile = load_profile(output)
    if as_json:
        print(profile.to_json().decode())
    else:
        _show(profile, Console())
    return 0


def what_it_trains(request: Request, *, environ: Mapping[str, str] = os.environ) -> Profile | None:
    """Return a profile without devices: the model and batch of a script, found out in one process without measuring.

    None: the script failed, and said why on standard error.

    Raises:
        RagtagError: the script ended without building a `Trainer`.
    """
    with tempfile.TemporaryDirectory(prefix="ragtag-plan-") as directory:
        output = Path(directory) / "facts.json"
        environ = {**environ, "RAGTAG_PROFILE": str(output), "RAGTAG_PROFILE_FACTS": "1"}
        with _standard_output_to_errors():
            status = launch_local(request, environ=environ)
        if status != 0:
            return None
        if not output.exists():
            raise RagtagError(no_trainer(request))
        return msgspec.json.decode(output.read_bytes(), type=Profile)


def no_trainer(request: Request) -> str:
    """Return what to say of a script that ended before it was measured."""
    return (
        f"'{' '.join(request.command)}' ended without building a ragtag.Trainer, so nothing was measured. Name the "
        f"script that trains, with the arguments it needs: ragtag profile train.py ..."
    )


def _check_writable(output: Path) -> None:
    if output.is_dir():
        raise SettingError(f"--output {output} is a directory. Name a file: --output {output / 'profile.json'}")
    if not os.access(output.absolute().parent, os.W_OK):
        raise SettingError(
            f"--output {output}: {output.absolute().parent} is no directory that can be written to. Name another file."
        )


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _standard_output_to_errors() -> Iterator[None]:
    """What workers print goes to standard error: standard output is the result's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show(profile: Profile, console: Console) -> None:
    model = profile.model
    console.print(
        f"{model.name}: {model.parameters:,} parameters, {format_bytes(model.gradient_bytes)} of gradients, "
        f"{format_bytes(model.optimizer_bytes)} of optimizer state; global batch {profile.global_batch_size}",
        highlight=False,
    )
    console.print(_times(profile.devices))
    console.print(_memory(profile.devices))
    for link in profile.links:
        between = "within " + link.between[0] if link.between[0] == link.between[1] else " - ".join(link.between)
        console.print(
            f"link {between}: {format_bandwidth(link.bandwidth_bytes_per_s)} (+-{100 * link.spread:.0f} %), "
            f"{1e3 * link.latency_s:.3g} ms",
            highlight=False,
        )
    if profile.blocks:
        console.print(f"{len(profile.blocks)} blocks measured", highlight=False)


def _times(devices: Sequence[DeviceProfile]) -> Table:
    table = _table("ms/sample", "of", "optimizer ms", "fixed ms", "jitter")
    for device in devices:
        last = device.timings[-1]
        table.add_row(
            device.name,
            f"{1e3 * last.seconds / last.samples:.3g} +-{100 * last.spread_s / last.seconds:.0f} %",
            f"{device.timings[0].samples}-{last.samples}",
            f"{1e3 * device.optimizer_s:.3g}",
            f"{1e3 * device.fixed_s:.3g}",
            f"{100 * device.jitter:.1f} %",
        )
    return table


def _memory(devices: Sequence[DeviceProfile]) -> Table:
    table = _table("has", "needs", "a sample", "recomputed")
    for device in devices:
        memory = device.memory
        if memory is not None:
            recomputed = memory.recompute_per_sample_bytes
            table.add_row(
                device.name,
                "?" if device.capacity_bytes is None else format_bytes(device.capacity_bytes),
                format_bytes(memory.fixed_bytes),
                format_bytes(memory.per_sample_bytes),
                "-" if recomputed is None else format_bytes(recomputed),
            )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("device")
    for title in titles:
        table.add_column(title, justify="right")
    return table
