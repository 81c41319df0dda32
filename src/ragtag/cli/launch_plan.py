"""What `ragtag launch --plan` makes of a plan file: how many workers, with which shares, as which emulated devices.

The one idea: a plan holds for the devices that it names. On any others it is refused, before anything is started.
"""

import atexit
import shutil
import socket
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
    island: str | None = None
    """What this site is called; None: it is not one of several."""
    mode: str = ""
    """How islands merge, as `Config.mode`; empty: there are none."""


def planned_run(
    path: Path,
    *,
    num_workers: int | None,
    emulate: Path | None,
    environ: Mapping[str, str],
    island: str | None = None,
    here: str | None = None,
) -> PlannedRun:
    """Return what the plan in `path` says for this machine, or for the cluster in the file `emulate`.

    Args:
        island: which of the plan's islands this site is; None: that of this host.
        here: name of this host; None: asked of the system.

    Raises:
        SettingError: no plan, one that the runtime cannot run, or one for other devices.
    """
    plan = load_plan(path)
    if plan.not_yet:
        raise SettingError(
            f"The plan {path} needs {plan.not_yet}, which this ragtag prices but cannot run yet. Plan again: it takes "
            f"what it can run wherever anything of that fits."
        )
    if plan.islands:
        return _island(plan, path, num_workers, emulate, environ, island, here or socket.gethostname())
    taking_part = [device.name for device in plan.devices if device.takes_part]
    if num_workers not in (None, len(taking_part)):
        raise SettingError(
            f"--local {num_workers}, but the plan {path} is for {len(taking_part)} devices ({_few(taking_part)}). "
            f"Leave --local out."
        )
    if emulate is not None:
        emulate = _reduced(plan, path, emulate)
    elif (found := num_accelerators(environ)) not in (0, len(taking_part)):
        left_out = [device.name for device in plan.devices if not device.takes_part]
        hide = f"; hide {_few(left_out)} with CUDA_VISIBLE_DEVICES" if left_out else ""
        raise SettingError(
            f"The plan {path} is for {len(taking_part)} devices ({_few(taking_part)}), and {found} are here. Plan for "
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


def _island(
    plan: PlanFile,
    path: Path,
    num_workers: int | None,
    emulate: Path | None,
    environ: Mapping[str, str],
    island: str | None,
    here: str,
) -> PlannedRun:
    """What one site of several does: its devices, under its name. Shares are found by each site while it trains."""
    named = ", ".join(f"{name} ({_few([each.name for each in devices])})" for name, devices in plan.islands.items())
    hosts = {each.host: name for name, devices in plan.islands.items() for each in devices}
    name = island or hosts.get(here)
    if name not in plan.islands:
        what = f"--island {island}" if island else f"This machine, '{here}',"
        raise SettingError(f"{what} is in no island of the plan {path}: {named}. Say which one this is: --island NAME.")
    if island is None and here != name:
        raise SettingError(
            f"'{here}' belongs to the island {name} of the plan {path}, whose run is started on '{name}'. Join it with "
            f"the line that is printed there: ragtag launch --hub HOST:PORT."
        )
    devices = [each.name for each in plan.islands[name] if each.host == name]
    if emulate is not None:
        there = [each.name for each in load_cluster(emulate).expanded()]
        if there != devices:
            raise SettingError(
                f"The island {name} of the plan {path} has {len(devices)} devices on its host ({_few(devices)}), and "
                f"{emulate} has {len(there)} ({_few(there)})."
            )
    elif (found := num_accelerators(environ)) not in (0, len(devices)):
        raise SettingError(
            f"The island {name} of the plan {path} has {len(devices)} devices on its host ({_few(devices)}), and "
            f"{found} are here. Plan for these: ragtag plan cluster.toml --profile p.json --output {path}."
        )
    if num_workers not in (None, len(devices)):
        raise SettingError(f"--local {num_workers}, but the island {name} has {len(devices)} devices. Leave it out.")
    return PlannedRun(
        num_workers=len(devices),
        shares=(),
        micro_batches=None,
        recompute=(),
        layout=None,
        slices=(),
        stages=(),
        stage_micro_batch=None,
        emulate=emulate,
        island=name,
        mode=plan.mode,
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
