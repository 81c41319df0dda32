"""What `ragtag launch --plan` makes of a plan file: how many workers, with which shares, as which emulated devices.

The one idea: a plan holds for the devices that it names. On any others it is refused, before anything is started.
"""

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ragtag.cli.cluster_toml import to_toml
from ragtag.cli.devices import num_accelerators
from ragtag.core.cluster_file import load_cluster
from ragtag.core.errors import SettingError
from ragtag.core.values import Stages
from ragtag.plan.file import PlanFile, load_plan


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What to start."""

    num_workers: int
    shares: tuple[int, ...]
    micro_batches: tuple[int | None, ...] | None
    """By worker; None: nothing limits any."""
    recompute: tuple[bool, ...]
    """By worker, whether it computes activations again in backward."""
    layout: str | None
    """What of the model's state is cut; None: nothing."""
    slices: tuple[int, ...]
    """Relative sizes of the slices, by worker."""
    stages: Stages
    """Of a pipeline; empty: it is none."""
    stage_micro_batch: int | None
    """Samples that pass a pipeline at a time; None: it is none."""
    emulate: Path | None


def planned_run(path: Path, *, num_workers: int | None, emulate: Path | None, environ: Mapping[str, str]) -> PlannedRun:
    """Return what the plan in `path` says for this machine, or for the cluster in the file `emulate`.

    Raises:
        SettingError: no plan, one that the runtime cannot run, or one for other devices.
    """
    plan = load_plan(path)
    if plan.not_yet:
        raise SettingError(
            f"The plan {path} needs {plan.not_yet}, which this ragtag prices but cannot run yet. Plan again: it takes "
            f"what it can run wherever anything of that fits."
        )
    taking_part = [device.name for device in plan.devices if device.takes_part]
    if num_workers not in (None, len(taking_part)):
        raise SettingError(
            f"--local {num_workers}, but the plan {path} is for {len(taking_part)} devices ({_few(taking_part)}). "
            f"Leave --local out."
        )
    if emulate is not None:
        emulate = _reduced(plan, path, emulate)
    elif (here := num_accelerators(environ)) not in (0, len(taking_part)):
        left_out = [device.name for device in plan.devices if not device.takes_part]
        hide = f"; hide {_few(left_out)} with CUDA_VISIBLE_DEVICES" if left_out else ""
        raise SettingError(
            f"The plan {path} is for {len(taking_part)} devices ({_few(taking_part)}), and {here} are here. Plan for "
            f"these{hide}: ragtag plan train.py --output {path}."
        )
    return PlannedRun(
        num_workers=len(taking_part),
        shares=plan.shares,
        micro_batches=plan.micro_batches if any(plan.micro_batches) else None,
        recompute=plan.recompute,
        layout=plan.layout.replace("-", "") if plan.slices or plan.stages else None,
        slices=plan.slices,
        stages=plan.stages,
        stage_micro_batch=next((d.micro_batch for d in plan.devices if d.blocks is not None), None),
        emulate=emulate,
    )


def _reduced(plan: PlanFile, path: Path, emulate: Path) -> Path:
    """Return a cluster file with the devices that take part; `emulate` itself where all do."""
    cluster = load_cluster(emulate)
    there = [device.name for device in cluster.expanded()]
    planned = [device.name for device in plan.devices]
    if there != planned:
        raise SettingError(
            f"The plan {path} is for {len(planned)} devices ({_few(planned)}), and {emulate} has {len(there)} "
            f"({_few(there)}). Plan for these: ragtag plan {emulate} --profile p.json --output {path}."
        )
    kept = {device.name for device in plan.devices if device.takes_part}
    if len(kept) == len(there):
        return emulate
    devices = tuple(device for device in cluster.expanded() if device.name in kept)
    hosts = {device.host for device in devices}
    links = tuple(link for link in cluster.links if set(link.between) <= hosts)
    directory = tempfile.mkdtemp(prefix="ragtag-launch-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    file = Path(directory) / emulate.name
    file.write_text(to_toml(msgspec.structs.replace(cluster, devices=devices, links=links)))
    return file


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
