"""What `ragtag demo` found, and how it follows from what three trainings printed. Pure arithmetic.

The one idea: both trainings are judged by the same function over the same steps: the second half of the run, when
ragtag's shares have settled. What the whole run took is told beside it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ragtag.cli.demo_timeline import Timeline, timeline
from ragtag.cli.demo_training import Row
from ragtag.core.cluster import Cluster

_PACE_TOLERANCE = 0.03
"""How far a device's compute time may be off what its speed says; beyond it the real work did not fit."""


class DemoDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One pretended device."""

    name: str
    speed: float
    solo_samples_per_s: float
    """By itself, measured in this run."""


class DemoTraining(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two trainings; tuples by device, times in seconds a step over the second half."""

    name: str
    wall_s: float
    """All steps, from the first one's start."""
    samples_per_s_overall: float
    samples_per_s: float
    """Over the second half of the steps."""
    eta: float
    """`samples_per_s` / sum of the devices' own."""
    final_loss: float
    largest_loss_difference: float
    """To one process, over all steps."""
    largest_parameter_difference: float
    """To one process: norm-relative, of the tensor where it is largest."""
    shares: tuple[float, ...]
    """Mean samples of a step."""
    busy_s: tuple[float, ...]
    """Forward, backward and optimizer."""
    comm_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    pace_error: float
    """Largest relative difference of a device's compute time to what its speed says."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step in the second half."""
        return sum(self.shares) / self.samples_per_s

    def wait_part(self, device: int) -> float:
        """Return the part of its time that `device` waits, from 0 to 1."""
        return self.wait_s[device] / (self.busy_s[device] + self.comm_s[device] + self.wait_s[device])


class DemoDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One change of shares."""

    step: int
    reason: str
    predicted_step_s: float
    achieved_step_s: float | None = None


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the demo shows."""

    steps: int
    global_batch_size: int
    devices: tuple[DemoDevice, ...]
    ddp: DemoTraining
    ragtag: DemoTraining
    one_process_loss: float
    speed_up: float
    """ragtag's samples/s over DDP's, second half."""
    speed_up_overall: float
    """The same of all steps, those before the shares had settled included."""
    decisions: tuple[DemoDecision, ...]
    honest: bool
    """Whether the real work fitted into the pretended devices' pace."""
    total_s: float
    """What the demo took, starting processes included."""
    files: dict[str, str]
    """Paths of what was written, by kind: "html", "png", "cluster"."""


def second_half(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows that figures are taken over."""
    return rows[len(rows) // 2 :]


def judge(
    name: str,
    rows: Sequence[Row],
    *,
    reference: Sequence[Row],
    parameter_difference: float,
    cluster: Cluster,
    solo_samples_per_s: Sequence[float],
) -> DemoTraining:
    """Return what `rows` amount to.

    Args:
        name: for people.
        rows: all steps.
        reference: the same steps by one process.
        parameter_difference: to the same.
        cluster: the pretended devices.
        solo_samples_per_s: of each device by itself.
    """
    settled = second_half(rows)
    samples_per_s = sum(sum(row.shares) for row in settled) / sum(row.wall_s for row in settled)
    wall_s = sum(row.wall_s for row in rows)
    done = timeline(settled)
    return DemoTraining(
        name=name,
        wall_s=wall_s,
        samples_per_s_overall=sum(sum(row.shares) for row in rows) / wall_s,
        samples_per_s=samples_per_s,
        eta=samples_per_s / sum(solo_samples_per_s),
        final_loss=rows[-1].loss,
        largest_loss_difference=max(abs(a.loss - b.loss) for a, b in zip(rows, reference)),
        largest_parameter_difference=parameter_difference,
        shares=tuple(sum(samples) / len(settled) for samples in zip(*(row.shares for row in settled))),
        busy_s=_per_step(done, "busy", len(settled), len(solo_samples_per_s)),
        comm_s=_per_step(done, "communicating", len(settled), len(solo_samples_per_s)),
        wait_s=_per_step(done, "waiting", len(settled), len(solo_samples_per_s)),
        pace_error=_pace_error(settled, cluster),
    )


def is_honest(facts_honest: bool, *trainings: DemoTraining) -> bool:
    """Whether the paces said so themselves and the compute times agree."""
    return facts_honest and all(training.pace_error <= _PACE_TOLERANCE for training in trainings)


def _per_step(done: Timeline, kind: Any, steps: int, num_devices: int) -> tuple[float, ...]:
    return tuple(done.total_s(device, kind) / steps for device in range(num_devices))


def _pace_error(rows: Sequence[Row], cluster: Cluster) -> float:
    """Seen from outside: needs nothing of the emulation but what it promised."""
    sample_s = cluster.emulation.sample_s
    assert sample_s is not None, "the demo's cluster is paced"
    errors = []
    for rank, device in enumerate(cluster.expanded()):
        asked_s = sum(row.shares[rank] for row in rows) * sample_s / device.speed
        if asked_s:
            errors.append(abs(sum(row.compute_s[rank] for row in rows) / asked_s - 1))
    return max(errors)
