"""Puts a cluster and a profile together: every rank with what was measured on it, and what lies between hosts.

The one idea: what was measured beats what the cluster file says, and what nobody measured is derived from `speed`, from
a measured device of the same kind or, without any profile, from `[emulate] sample_ms`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from math import exp
from typing import Literal

import msgspec

from ragtag.core.cluster import Cluster, Device, Emulation
from ragtag.core.errors import SettingError, did_you_mean
from ragtag.core.profile import Block, DeviceProfile, LinkProfile, ModelFacts, Profile, Timing
from ragtag.cost.comm import LOOPBACK
from ragtag.cost.device import constant_s, largest_micro_batch, time_s
from ragtag.cost.outer import USUAL_LOSS_FALL


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the cluster."""

    name: str
    host: str
    price_per_hour: float
    device: DeviceProfile
    """Its measurements, under its own name; equal devices have equal ones but for name and UUID."""


Mode = Literal["auto", "exact", "islands", "async"]


class Problem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a planner needs to know. `ranks` in the order of the cluster file."""

    ranks: tuple[Rank, ...]
    links: tuple[LinkProfile, ...]
    model: ModelFacts
    global_batch_size: int
    blocks: tuple[Block, ...] = ()
    bucket_bytes: int = 4 << 20
    """As `Config.bucket_bytes`: gradients are reduced in pieces of this size, behind the backward."""
    mode: Mode = "auto"
    """As `Config.mode`: which ways of synchronising are looked at."""
    loss_fall: float = USUAL_LOSS_FALL
    """S / L = -dL / dln(samples) / L of the run: what a loss that is higher costs in samples."""

    @cached_property
    def link(self) -> Callable[[str, str], LinkProfile | None]:
        """What lies between two hosts; None: not known."""
        known: dict[tuple[str, str], LinkProfile] = {}
        for link in self.links:
            first, second = link.between
            known[first, second] = known[second, first] = link
        return lambda host, other: known.get((host, other))

    @cached_property
    def by_name(self) -> dict[str, Rank]:
        """The ranks by their names."""
        return {rank.name: rank for rank in self.ranks}

    @cached_property
    def alike(self) -> tuple[DeviceProfile, ...]:
        """By rank: the first device whose measurements are the same, so that `is` says whether two are equal."""
        first: dict[tuple[object, ...], DeviceProfile] = {}
        return tuple(first.setdefault(_measurements(rank.device), rank.device) for rank in self.ranks)

    @cached_property
    def summed_solo_samples_per_s(self) -> float:
        """The sum of what every device would do alone; where the model does not fit, a device counts 0."""
        counts = Counter(map(id, self.alike))
        kinds = {id(device): device for device in self.alike}
        total = sum(
            count * solo_samples_per_s(kinds[key], self.global_batch_size, self.model.unit)
            for key, count in counts.items()
        )
        return total or float("inf")


def assemble(profile: Profile, cluster: Cluster | None = None) -> Problem:
    """Return the problem of training the profile's model on `cluster` (None: on the profile's devices, on one host).

    Raises:
        SettingError: a device of the cluster was not measured, nor one of its kind.
    """
    if cluster is None:
        cluster = Cluster(devices=tuple(Device(name=device.name, kind=device.kind) for device in profile.devices))
    described = [
        LinkProfile(
            between=link.between,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s or LOOPBACK.bandwidth_bytes_per_s,
            latency_s=max(link.latency_s, LOOPBACK.latency_s),
        )
        for link in cluster.links
    ]
    measured = {frozenset(link.between) for link in profile.links}
    speeds = {device.name: device.speed for device in cluster.expanded()}
    speeds |= {device.name: device.speed for device in cluster.devices}
    return Problem(
        ranks=tuple(_rank(device, profile, speeds) for device in cluster.expanded()),
        links=(*(link for link in described if frozenset(link.between) not in measured), *profile.links),
        model=profile.model,
        global_batch_size=profile.global_batch_size,
        blocks=profile.blocks,
    )


def profile_from_speeds(
    cluster: Cluster, *, global_batch_size: int, gradient_bytes: int = 0, source: str = "the cluster file"
) -> Profile:
    """Return what `speed` and `[emulate]` say about the devices of `cluster`, in the form of a profile.

    Raises:
        SettingError: there is no sample_ms to which speeds would be relative.
    """
    emulation = cluster.emulation
    if emulation.sample_s is None:
        raise SettingError(
            f"{source} gives speeds, but not what they are relative to, and there is no profile. Say what forward and "
            f"backward of one sample take at speed 1, [emulate] and below it sample_ms = 40; or measure: "
            f"ragtag profile --output p.json train.py, then ragtag plan {source} --profile p.json."
        )
    if global_batch_size < 1:
        raise SettingError(f"--batch {global_batch_size} is not valid. Expected at least 1 sample: --batch 256.")
    devices = []
    for device in cluster.expanded():
        devices.append(
            DeviceProfile(
                name=device.name,
                kind=device.kind,
                timings=emulated_timings(emulation, device.speed),
                optimizer_s=emulation.optimizer_s / device.speed,
                fixed_s=emulation.fixed_s / device.speed,
                jitter=emulation.jitter,
            )
        )
    facts = ModelFacts(
        name="(not measured)",
        shape_hash="",
        parameters=gradient_bytes // 4,
        parameter_bytes=gradient_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=0,
    )
    return Profile(model=facts, global_batch_size=global_batch_size, devices=tuple(devices))


def emulated_timings(emulation: Emulation, speed: float) -> tuple[Timing, ...]:
    """Return what micro-batches of some sizes take on an emulated device, where `sample_ms` is known."""
    assert emulation.sample_s is not None, "nothing says what speeds are relative to"
    seconds = {size: emulation.micro_batch_s + size * emulation.sample_s for size in (1, 2, 64)}
    return tuple(Timing(samples=size, seconds=value / speed) for size, value in seconds.items())


def solo_samples_per_s(device: DeviceProfile, batch: int, unit: int = 1) -> float:
    """Return what `device` would do with steps of `batch` samples alone; 0: the model does not fit.

    Where its time varies, by its mean: a log-normal factor of median 1 has mean exp(sigma^2 / 2).
    """
    largest = largest_micro_batch(device)
    if largest is not None and largest < min(unit, batch):
        return 0.0
    micro_batch = unit if unit > 1 else batch if largest is None else min(largest, batch)
    work_s = time_s(device, batch, micro_batch) * exp(device.jitter**2 / 2)
    return batch / (constant_s(device) + batch * device.data_s + work_s)


def _measurements(device: DeviceProfile) -> tuple[object, ...]:
    """What decides how a device is planned for; its name and how it was measured do not."""
    return (
        device.timings,
        device.recompute_timings,
        device.forward_part,
        device.optimizer_s,
        device.fixed_s,
        device.data_s,
        device.capacity_bytes,
        device.memory,
        device.jitter,
        device.bucket_ready,
    )


def _rank(device: Device, profile: Profile, speeds: dict[str, float]) -> Rank:
    found = _measured(device, profile.devices, speeds)
    capacity = device.memory_bytes if device.memory_bytes is not None else found.capacity_bytes
    return Rank(
        name=device.name,
        host=device.host,
        price_per_hour=device.price_per_hour,
        device=msgspec.structs.replace(found, name=device.name, capacity_bytes=capacity),
    )


def _measured(device: Device, measured: Sequence[DeviceProfile], speeds: dict[str, float]) -> DeviceProfile:
    """The device itself, another one of its entry ("box" or "box-0" for "box-3"), or one of its kind."""
    entry = device.name.rpartition("-")[0] if device.name.rpartition("-")[2].isdigit() else device.name
    by_name = {other.name: other for other in measured}
    for name in (device.name, entry):
        if name in by_name:
            return by_name[name]
    same_entry = next((other for other in measured if other.name.rpartition("-")[0] == entry), None)
    if same_entry is not None:
        return same_entry
    # "cpu" and "cuda" say nothing about speed; kinds like "rtx3090" do.
    for other in measured:
        if other.kind == device.kind and (device.kind not in ("cpu", "cuda", "rocm", "mps") or other.name in speeds):
            return scaled(other, device.speed / speeds.get(other.name, 1.0))
    close = did_you_mean(device.name, by_name)
    raise SettingError(
        f"The device '{device.name}' was not measured, nor any of kind '{device.kind}'.{close} The profile has "
        f"{', '.join(by_name)}. Measure again: ragtag profile train.py; or give the device a kind that was measured."
    )


def scaled(device: DeviceProfile, factor: float) -> DeviceProfile:
    """Return a device that is `factor` times as fast."""
    if factor == 1.0:
        return device
    return msgspec.structs.replace(
        device,
        uuid="",
        timings=_faster(device.timings, factor),
        recompute_timings=_faster(device.recompute_timings, factor),
        optimizer_s=device.optimizer_s / factor,
        fixed_s=device.fixed_s / factor,
    )


def _faster(timings: tuple[Timing, ...], factor: float) -> tuple[Timing, ...]:
    return tuple(
        Timing(samples=timing.samples, seconds=timing.seconds / factor, spread_s=timing.spread_s / factor)
        for timing in timings
    )
