"""What was measured about devices, links and one model: the numbers that planning and simulation start from.

The one idea: a profile holds measurements, medians with their spread, and no conclusion; `cost` draws them. It is JSON
with a schema version, made by `ragtag profile` or by hand, and read by `ragtag plan` and `ragtag simulate`.
"""

from pathlib import Path
from typing import Any

import msgspec

from ragtag.core.errors import SettingError
from ragtag.core.one_go import write_in_one_go

SCHEMA = 1


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch of `samples`: median seconds over repetitions, and half the middle 90 % of them."""

    samples: int
    seconds: float
    spread_s: float = 0.0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that training needs on a device: fixed + per_sample * (samples of one micro-batch)."""

    fixed_bytes: int
    """Parameters, gradients, optimizer state, buckets."""
    per_sample_bytes: int
    """Activations of one sample."""
    recompute_per_sample_bytes: int | None = None
    """The same when activations are recomputed in backward; None: not measured."""


BEFORE_BLOCKS, AFTER_BLOCKS = "before the blocks", "after the blocks"
"""Names of what was measured outside of the blocks."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of the model, in forward order: what a pipeline can be cut between."""

    name: str
    forward_s: float
    """Seconds a sample on the device that the profile names first."""
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    """Kept for backward, a sample."""
    output_bytes: int
    """Handed to the next block, a sample."""
    spread: float = 0.0
    """Relative spread of its time over repetitions."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one kind, by the name it has in the cluster file."""

    name: str
    host: str = ""
    """As links name it; empty: not known, ask the cluster file."""
    uuid: str = ""
    kind: str = "cpu"
    timings: tuple[Timing, ...]
    """Forward and backward of one micro-batch, by growing size; at least one."""
    recompute_timings: tuple[Timing, ...] = ()
    """The same with activations recomputed in backward."""
    forward_part: float = 1 / 3
    """Forward's part of forward and backward."""
    optimizer_s: float = 0.0
    """The optimizer's step on the whole model: does not shrink with the batch."""
    fixed_s: float = 0.0
    """Other work of a step that does not shrink: data, control, applying."""
    capacity_bytes: int | None = None
    """Memory that training may use; None: not known, not limited."""
    memory: Memory | None = None
    jitter: float = 0.0
    """Relative standard deviation of a step's compute time."""
    bucket_ready: tuple[float, ...] = ()
    """For each of the model's buckets, the part of a backward after which it is complete; empty: not measured."""
    data_s: float = 0.0
    """Reading one sample where the training thread reads it itself; 0 where loader workers read ahead."""
    spreads: dict[str, float] = {}
    """Half the middle 90 % of the repetitions of a number, by its field: optimizer_s, fixed_s, data_s, forward_part."""
    notes: tuple[str, ...] = ()
    """What was not measured, and why; what was reused."""
    measured_at: float = 0.0
    """Seconds since 1970; older than the profile's where the device's numbers were reused."""


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What lies between two hosts, in each direction; `between` may name one host twice (devices beside each other)."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float
    spread: float = 0.0
    """Relative spread of the bandwidth over repetitions."""
    latency_spread_s: float = 0.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model and optimizer that were measured."""

    name: str
    shape_hash: str
    """Hash of parameter names, shapes and dtypes, and of the optimizer's class."""
    run_hash: str = ""
    """Hash of the layers, of the shape of a sample and of the precision, on which times depend; empty: not known."""
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    """What is reduced over ranks in one step."""
    optimizer_bytes: int
    bucket_bytes: tuple[int, ...] = ()
    """The pieces in which gradients travel, in their order, as many bytes as they are on the wire; empty: not known,
    equal ones of about 4 MiB."""
    separable: bool = True
    unit: int = 1
    """Samples that are always computed together."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything measured, in one file."""

    schema: int = SCHEMA
    model: ModelFacts
    global_batch_size: int
    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    blocks: tuple[Block, ...] = ()
    versions: dict[str, str] = {}
    """ragtag, torch, python."""
    measured_at: float = 0.0
    """Seconds since 1970."""

    def to_json(self) -> bytes:
        """Return the file's content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the file in one go: a reader never sees half of it."""
        write_in_one_go(Path(path), self.to_json())


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        SettingError: the file cannot be read, is not a profile, or says something impossible; names file, key and fix.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SettingError(
            f"The profile {path} cannot be read: {error.strerror}. Make one: ragtag profile --output {path} train.py"
        ) from error
    try:
        tree: Any = msgspec.json.decode(content)
        if isinstance(tree, dict) and tree.get("schema") != SCHEMA:
            raise SettingError(
                f"The profile {path} has schema {tree.get('schema')!r}; this ragtag reads {SCHEMA}. Measure again: "
                f"ragtag profile --output {path} train.py"
            )
        profile = msgspec.convert(tree, Profile)
    except msgspec.MsgspecError as error:
        raise SettingError(f"The profile {path} is not valid: {error}. Measure again with ragtag profile.") from error
    _check(profile, str(path))
    return profile


def _check(profile: Profile, source: str) -> None:
    if not profile.devices:
        raise SettingError(f"{source}: devices: there is none. Measure at least one device.")
    if profile.global_batch_size < 1:
        raise SettingError(f"{source}: global_batch_size: {profile.global_batch_size}. Expected at least 1.")
    names: set[str] = set()
    for index, device in enumerate(profile.devices):
        where = f"{source}: devices[{index}] ('{device.name}')"
        if device.name in names:
            raise SettingError(f"{where}: name: there is another device of that name. Give each its own.")
        names.add(device.name)
        for field in ("timings", "recompute_timings"):
            sizes = [timing.samples for timing in getattr(device, field)]
            if (field == "timings" and not sizes) or sizes != sorted(set(sizes)) or (sizes and sizes[0] < 1):
                raise SettingError(f"{where}: {field}: sizes {sizes}. Expected growing whole numbers from 1 on.")
            if any(timing.seconds <= 0 for timing in getattr(device, field)):
                raise SettingError(f"{where}: {field}: a time of 0 or less. Expected seconds above 0.")
        if device.capacity_bytes is not None and device.capacity_bytes <= 0:
            raise SettingError(f"{where}: capacity_bytes: {device.capacity_bytes}. Expected bytes above 0, or null.")
        ready, num_buckets = device.bucket_ready, len(profile.model.bucket_bytes)
        if ready and (len(ready) != num_buckets or list(ready) != sorted(ready) or ready[0] < 0 or ready[-1] > 1):
            raise SettingError(
                f"{where}: bucket_ready: {list(ready)}. Expected one part of the backward, growing from 0 to 1, for "
                f"each of the {num_buckets} buckets in model.bucket_bytes."
            )
        if min(device.optimizer_s, device.fixed_s, device.jitter) < 0:
            raise SettingError(f"{where}: optimizer_s, fixed_s and jitter must not be negative.")
    for index, link in enumerate(profile.links):
        if link.bandwidth_bytes_per_s <= 0 or link.latency_s < 0:
            raise SettingError(f"{source}: links[{index}]: expected a bandwidth above 0 and a latency of at least 0.")
