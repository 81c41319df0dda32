"""The plan file: what `ragtag plan --output` writes and `ragtag launch --plan` takes.

The one idea: it names every device of the cluster it was made for, so that a launch on another one is refused by name
instead of running with shares that mean something else.
"""

from pathlib import Path

import msgspec

from ragtag.core.errors import SettingError
from ragtag.core.one_go import write_in_one_go
from ragtag.core.values import DocumentError, Stage, Stages, from_json, to_json
from ragtag.cost.device import largest_micro_batch
from ragtag.cost.problem import Problem
from ragtag.plan.search import Choice


class PlannedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the cluster, in its order."""

    name: str
    samples: int
    micro_batch: int
    """Most samples of one forward in this plan."""
    largest_micro_batch: int | None = None
    """Most samples of one forward that its memory holds; None: any number, or not known."""
    recompute: bool = False
    """It computes activations again in backward instead of keeping them."""
    state_bytes: int | None = None
    """Its slice of the model's state; None: it holds all of it."""
    blocks: tuple[int, int] | None = None
    """In a pipeline: the first block of its stage and the one after its last."""
    host: str = ""
    island: str = ""
    """Host of the first device of its island; empty: there are none."""
    takes_part: bool = True
    memory_bytes: int | None = None


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to launch."""

    layout: str
    global_batch_size: int
    devices: tuple[PlannedDevice, ...]
    predicted_step_s: float
    predicted_samples_per_s: float
    reason: str
    mode: str = ""
    """`Config.mode` of a plan of islands; empty: it is none."""
    unit: int = 1
    not_yet: str = ""
    """What the runtime cannot do yet; empty: it can run this plan."""

    @property
    def islands(self) -> dict[str, tuple[PlannedDevice, ...]]:
        """The devices of each island that take part, by its name; the first one starts the run."""
        found: dict[str, tuple[PlannedDevice, ...]] = {}
        for device in self.devices:
            if device.takes_part and device.island:
                found[device.island] = (*found.get(device.island, ()), device)
        return found

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of the devices that take part."""
        return tuple(device.samples for device in self.devices if device.takes_part)

    @property
    def recompute(self) -> tuple[bool, ...]:
        """Whether the devices that take part compute activations again."""
        return tuple([device.recompute for device in self.devices if device.takes_part])

    @property
    def slices(self) -> tuple[int, ...]:
        """Slices of the devices that take part, in bytes; empty: nothing is cut."""
        sizes = [device.state_bytes for device in self.devices if device.takes_part]
        return tuple([size for size in sizes if size is not None])

    @property
    def stages(self) -> Stages:
        """The pipeline, its ranks counted among the devices that take part; empty: this is none."""
        taking_part = [device for device in self.devices if device.takes_part]
        if self.layout != "pipeline":
            return ()
        found = [
            Stage(rank=rank, first=device.blocks[0], stop=device.blocks[1])
            for rank, device in enumerate(taking_part)
            if device.blocks is not None
        ]
        return (tuple(sorted(found, key=lambda stage: stage.first)),)

    @property
    def micro_batches(self) -> tuple[int | None, ...]:
        """Most samples of one forward of the devices that take part, whatever their shares become; None: any number.

        A device whose whole share is one micro-batch is limited by its memory alone.
        """
        taking_part = [device for device in self.devices if device.takes_part]
        if self.unit > 1 or self.layout == "pipeline":
            return (None,) * len(taking_part)
        return tuple(
            device.micro_batch if device.micro_batch < device.samples else device.largest_micro_batch
            for device in taking_part
        )


def plan_file(problem: Problem, choice: Choice) -> PlanFile:
    """Return the chosen candidate as a file's content."""
    candidate, prediction = choice.best.candidate, choice.best.prediction
    assert candidate is not None
    assert prediction is not None
    parts = {part.device: part for part in candidate.parts}
    memory = {device.device: device.memory_bytes for device in prediction.devices}
    samples = {part.device: part.samples for part in candidate.parts}
    if candidate.layout == "pipeline":  # those that pass all stages are the last one's
        samples = {part.device: 0 for part in candidate.parts} | {
            candidate.parts[-1].device: candidate.parts[-1].samples
        }
    hosts = [problem.by_name[part.device].host for part in candidate.parts]
    first: dict[int, str] = {}
    for part, host in zip(candidate.parts, hosts):
        first.setdefault(part.island, host)
    return PlanFile(
        layout=candidate.layout,
        global_batch_size=problem.global_batch_size,
        devices=tuple(
            PlannedDevice(
                name=rank.name,
                samples=samples.get(rank.name, 0),
                micro_batch=parts[rank.name].micro_batch if rank.name in parts else 1,
                largest_micro_batch=largest_micro_batch(rank.device, rank.name in parts and parts[rank.name].recompute),
                recompute=rank.name in parts and parts[rank.name].recompute,
                state_bytes=parts[rank.name].state_bytes if rank.name in parts else None,
                blocks=parts[rank.name].blocks if rank.name in parts else None,
                host=rank.host,
                island=first[parts[rank.name].island] if candidate.layout == "islands" and rank.name in parts else "",
                takes_part=rank.name in parts,
                memory_bytes=memory.get(rank.name),
            )
            for rank in problem.ranks
        ),
        predicted_step_s=prediction.step_s,
        predicted_samples_per_s=prediction.samples_per_s,
        reason=choice.reason,
        mode="async" if candidate.asynchronous else "islands" if candidate.layout == "islands" else "",
        unit=candidate.unit,
        not_yet=candidate.not_yet,
    )


def save_plan(plan: PlanFile, path: Path) -> None:
    """Write `plan` in one go.

    Raises:
        SettingError: the file cannot be written.
    """
    try:
        write_in_one_go(path, to_json(plan) + b"\n")
    except OSError as error:
        raise SettingError(f"The plan cannot be written to {path}: {error.strerror}.") from None


def load_plan(path: Path) -> PlanFile:
    """Read a plan file.

    Raises:
        SettingError: it cannot be read or is no plan.
    """
    again = f"Make one: ragtag plan cluster.toml --profile p.json --output {path}."
    try:
        plan = from_json(PlanFile, path.read_bytes())
    except OSError as error:
        raise SettingError(f"The plan {path} cannot be read: {error.strerror}. {again}") from None
    except DocumentError as error:
        raise SettingError(f"{path}: {error} {again}") from None
    if not plan.devices or sum(plan.shares) != plan.global_batch_size:
        raise SettingError(
            f"{path}: the shares of its devices sum to {sum(plan.shares)}, its global batch is "
            f"{plan.global_batch_size}. {again}"
        )
    return plan
