"""Measures instead of training: where RAGTAG_PROFILE names a file, the trainer ends here, with the profile written.

The one idea: all ranks measure their devices at the same time, as they will train, sharing cores and buses; links are
measured one after another, so that they do not disturb each other.
"""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from ragtag.core.errors import SettingError
from ragtag.core.profile import Block, DeviceProfile, LinkProfile, ModelFacts, Profile
from ragtag.cost.comm import vote_s as latency_of_vote_s
from ragtag.emulate.environment import Emulator
from ragtag.profile.cache import Cache, Entry, age_in_words, cache_directory, key_of
from ragtag.profile.device import Effort, measure_device
from ragtag.profile.links import links_between
from ragtag.profile.statistics import half_spread
from ragtag.runtime.batches import leaves
from ragtag.runtime.device import device_kind
from ragtag.runtime.names import named_parameters
from ragtag.runtime.probe import RunProbe
from ragtag.runtime.randomness import preserved_random_state
from ragtag.runtime.run import Run

VARIABLE = "RAGTAG_PROFILE"
FRESH_VARIABLE = "RAGTAG_PROFILE_FRESH"
FACTS_VARIABLE = "RAGTAG_PROFILE_FACTS"
"""Set: nothing is measured, the profile says only what model the script trains, and has no devices."""
_VOTES = 20
_VOTE_BYTES = 160


def wanted_profile(environ: Mapping[str, str]) -> Path | None:
    """Return the file that RAGTAG_PROFILE names: measure, write it and end, instead of training."""
    text = environ.get(VARIABLE, "").strip()
    return Path(text) if text else None


def measure(
    run: Run,
    path: Path,
    *,
    emulator: Emulator | None,
    environ: Mapping[str, str] = os.environ,
    effort: Effort | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> Profile:
    """Measure this rank's device and all links; rank 0 writes the profile. The run is afterwards as it was.

    Raises:
        RagtagError: on every rank: a device is too small for the model, or the file cannot be written.
    """
    group, started_s, now_s = run.group, time.perf_counter(), wall_clock()
    say = partial(_say, started_s) if group.rank == 0 else _say_nothing
    if environ.get(FACTS_VARIABLE, ""):
        return _only_facts(run, path, now_s)
    names, hosts = _names(run, emulator)
    cache = Cache(cache_directory(environ), now_s)
    versions = _versions()
    model = _model_facts(run)
    key = key_of(_facts(run, emulator, model, versions))
    entry = None if environ.get(FRESH_VARIABLE, "") else cache.find(key)
    with preserved_random_state(run.device):
        if entry is None:
            group.note(0, "measuring this device")
            entry = _measure(run, names[group.rank], emulator, effort, say, now_s)
            report = run.pace.report()
            if report is not None and not report.honest:
                problem = report.line
            else:
                problem = cache.store(key, entry)
            if problem:
                note = f"These measurements are not kept for the next time: {problem}"
                entry = msgspec.structs.replace(
                    entry, device=msgspec.structs.replace(entry.device, notes=(*entry.device.notes, note))
                )
            reused = ""
        else:
            age = age_in_words(now_s - entry.device.measured_at)
            reused = f"Reused what was measured {age} ago; --fresh measures anew."
    say("waiting for the other devices")
    vote_s = _vote_s(run)
    links = links_between(group, hosts, say)
    # Links' part in a vote is predicted from links, for those hosts that take part.
    travel_s = latency_of_vote_s(hosts, _between(links))
    own = msgspec.structs.replace(
        entry.device,
        name=names[group.rank],
        host=hosts[group.rank],
        fixed_s=entry.device.fixed_s + max(0.0, median(vote_s) - travel_s),
        spreads={**entry.device.spreads, "fixed_s": entry.device.spreads.get("fixed_s", 0.0) + half_spread(vote_s)},
        notes=(*entry.device.notes, *((reused,) if reused else ())),
    )
    devices = tuple(
        msgspec.convert(each, DeviceProfile) for each in group.gather("device profile", msgspec.to_builtins(own))
    )
    for device in devices:
        for note in device.notes:
            say(f"{device.name}: {note}")
    blocks = group.gather("blocks", [msgspec.to_builtins(block) for block in entry.blocks])[0]
    profile = Profile(
        model=msgspec.structs.replace(model, optimizer_bytes=entry.optimizer_bytes),
        global_batch_size=run.sampler.global_batch_size,
        devices=devices,
        links=links,
        blocks=tuple(msgspec.convert(block, Block) for block in blocks),
        versions=versions,
        measured_at=now_s,
    )
    _write(run, profile, path)
    if group.rank == 0:
        print(
            f"{model.name} profiled on {len(devices)} device(s) and {len(profile.links)} link(s) in "
            f"{time.perf_counter() - started_s:.0f} s: {path}",
            flush=True,
        )
    return profile


def _only_facts(run: Run, path: Path, now_s: float) -> Profile:
    profile = Profile(
        model=_model_facts(run),
        global_batch_size=run.sampler.global_batch_size,
        devices=(),
        versions=_versions(),
        measured_at=now_s,
    )
    _write(run, profile, path)
    return profile


def _measure(
    run: Run,
    name: str,
    emulator: Emulator | None,
    effort: Effort | None,
    say: Callable[[str], None],
    now_s: float,
) -> Entry:
    group, nature = run.group, run.nature
    most = run.sampler.batch(1).size
    least = min(most, 2 if nature.batch_norm else 1)
    probe = RunProbe(
        run,
        least=least,
        ranks_on_host=group.hosts.count(group.hosts[group.rank]),
        pretended=emulator is not None,
    )
    with probe.restored():
        device = measure_device(
            probe,
            name=name,
            uuid=device_uuid(run.device, emulator),
            kind=emulator.device.kind if emulator else device_kind(run.device),
            least=least,
            most=most,
            also=(min(run.plan.unit, most),) if run.by_unit else (),
            reads_ahead=run.loader.reads_ahead,
            effort=effort,
            progress=say,
            measured_at=now_s,
        )
        optimizer_bytes = probe.optimizer_bytes()
        blocks: tuple[Block, ...] = ()
        if group.rank == 0 and not probe.refusal:
            say("blocks")
            timing = device.timings[len(device.timings) // 2]
            blocks = probe.blocks(timing.samples, timing.seconds / timing.samples)
            if probe.refusal:
                device = msgspec.structs.replace(
                    device, notes=(*device.notes, f"Blocks were not measured: {probe.refusal}.")
                )
    return Entry(device=device, blocks=blocks, optimizer_bytes=optimizer_bytes)


def _vote_s(run: Run) -> list[float]:
    """Seconds of a step's vote, which every step waits for."""
    if run.group.world_size == 1:
        return [0.0]
    seconds = []
    for _ in range(_VOTES + 1):
        started_s = time.perf_counter()
        run.group.exchange(bytes(_VOTE_BYTES), "measuring a vote")
        seconds.append(time.perf_counter() - started_s)
    return seconds[1:]  # the first one waited for the slowest device's measurements


def _between(links: Sequence[LinkProfile]) -> Callable[[str, str], LinkProfile | None]:
    known = {frozenset(link.between): link for link in links}
    return lambda host, other: known.get(frozenset((host, other)))


def _write(run: Run, profile: Profile, path: Path) -> None:
    refusal = None
    if run.group.rank == 0:
        try:
            profile.save(path)
        except OSError as error:
            refusal = f"The profile cannot be written to {path}: {error.strerror}. Name another file: --output p.json"
    refusal = run.group.gather("profile written", refusal)[0]
    if refusal is not None:
        error = SettingError(refusal)
        error.origin_rank = 0
        raise error


def _names(run: Run, emulator: Emulator | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of devices and of hosts, by rank: those of the cluster file, or made from where a rank runs."""
    if emulator is not None:
        devices = emulator.cluster.expanded()[: run.group.world_size]
        return tuple(device.name for device in devices), tuple(device.host for device in devices)
    hosts = run.group.hosts
    numbers = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    kinds = run.group.gather("device type", run.device.type)
    return tuple(f"{host}-{kind}-{number}" for host, kind, number in zip(hosts, kinds, numbers)), hosts


def device_uuid(device: torch.device, emulator: Emulator | None) -> str:
    """What tells this device from all others: the driver's UUID; a CPU's host and model; what is pretended besides."""
    if device.type == "cpu":
        real = f"{platform.node()} {_cpu_model()} {device_kind(device)}"
    else:
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
        real = str(getattr(properties, "uuid", "") or f"{platform.node()} {device_kind(device)} {device.index}")
    if emulator is None:
        return real if device.type != "cpu" else f"cpu-{_short(real)}"
    pretended = [msgspec.to_builtins(emulator.device), msgspec.to_builtins(emulator.cluster.emulation)]
    return f"emulated-{_short(repr([real, pretended]))}"


def _cpu_model(file: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _model_facts(run: Run) -> ModelFacts:
    parameters = list(run.model.parameters())
    half = run.config.wire == "bf16"
    described = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in named_parameters(run.model)]
    return ModelFacts(
        name=type(getattr(run.model, "_orig_mod", run.model)).__name__,
        shape_hash=_short(repr([described, type(run.optimizer).__name__])),
        run_hash=_short(repr([repr(run.model), _sample_shapes(run), run.precision])),
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        gradient_bytes=sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in run.replica_sums().buckets),
        optimizer_bytes=0,  # known once it has stepped
        bucket_bytes=tuple(
            bucket.flat.numel() * (2 if half and bucket.flat.dtype == torch.float32 else bucket.flat.element_size())
            for bucket in run.replica_sums().buckets
        ),
        separable=run.nature.separable and not run.by_unit,
        unit=run.plan.unit,
    )


def _facts(run: Run, emulator: Emulator | None, model: ModelFacts, versions: Mapping[str, str]) -> dict[str, Any]:
    """Everything that changes what is measured."""
    code = getattr(run.loss_fn, "__code__", None)
    return {
        "uuid": device_uuid(run.device, emulator),
        "threads": torch.get_num_threads(),
        "ranks_on_host": run.group.hosts.count(run.group.hosts[run.group.rank]),
        "model": model.shape_hash,
        "layers": _short(repr(run.model)),
        "loss": _short(repr((code.co_code, code.co_names))) if code else type(run.loss_fn).__name__,
        "sample": _sample_shapes(run),
        "global_batch_size": run.sampler.global_batch_size,
        "unit": [run.plan.unit, run.by_unit],
        "precision": run.device_precision,
        "reads_ahead": run.loader.reads_ahead,
        "buckets": list(model.bucket_bytes),
        "blocks": run.group.rank == 0,
        "versions": dict(versions),
    }


def _sample_shapes(run: Run) -> list[Any]:
    run.loader.request((1, -1), run.sampler.batch(1).epoch, run.sampler.indices(1, 0, 1))
    return [
        [list(leaf.shape), str(leaf.dtype)] if hasattr(leaf, "shape") else type(leaf).__name__
        for leaf in leaves(run.loader.take([(1, -1)]))
    ]


def _versions() -> dict[str, str]:
    try:
        own = version("ragtag")
    except PackageNotFoundError:
        own = "source"
    return {"ragtag": own, "torch": str(torch.__version__), "python": platform.python_version()}


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _say(started_s: float, text: str) -> None:
    print(f"profile {time.perf_counter() - started_s:5.1f} s: {text}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
