"""Where the model is cut into stages, from what ranks measured before the first step.

The one idea: the planner decides, with the same program and the same prices as `ragtag plan`.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from ragtag.core.errors import ModelError, SettingError
from ragtag.core.profile import Block, DeviceProfile, LinkProfile, ModelFacts
from ragtag.core.quantities import format_bytes
from ragtag.core.stages import text_from_stages
from ragtag.core.values import Layout, Stage, Stages
from ragtag.cost.pipeline import folded, stage_s, state_bytes
from ragtag.cost.problem import Problem, Rank
from ragtag.cost.step import predict_on
from ragtag.plan.pipeline import pipelines
from ragtag.plan.sharded import zero

_QUICKER = 0.85
"""Times the step of the layout that it is compared with."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Stages, and how samples pass them."""

    stages: Stages
    samples: tuple[int, ...]
    """Of a global batch, by pipeline."""
    micro_batch: int
    reason: str
    step_s: float = 0.0
    """Predicted; 0: it was not."""
    slices_step_s: float = 0.0
    """That of the layout it was compared with; 0: with none."""

    @property
    def is_quicker(self) -> bool:
        """Whether it is, by more than predictions are off."""
        return self.step_s < _QUICKER * self.slices_step_s


def choose_cut(
    devices: Sequence[DeviceProfile],
    links: Sequence[LinkProfile],
    blocks: Sequence[Block],
    model: ModelFacts,
    *,
    global_batch_size: int,
    micro_batch: int | None,
    pinned: Stages | None,
    slices: Layout | None = None,
) -> Cut:
    """Return the stages, the same on every rank that knows the same.

    Args:
        devices: by rank.
        blocks: what was measured of the model's, folded or not.
        micro_batch: samples, where they are set.
        pinned: stages that are set.
        slices: the layout that would be taken else, whose step is predicted too.

    Raises:
        ModelError: the model fits under no cut.
        SettingError: more pipelines than samples.
    """
    ranks = tuple(
        Rank(name=str(rank), host=device.host, price_per_hour=0.0, device=device) for rank, device in enumerate(devices)
    )
    problem = Problem(
        ranks=ranks,
        links=tuple(links),
        model=model,
        global_batch_size=global_batch_size,
        blocks=folded(blocks),
    )
    if pinned is not None:
        return _pinned(problem, pinned, micro_batch)
    candidate = pipelines(problem, micro_batch=micro_batch)
    if candidate is None:
        needed = state_bytes(problem, problem.blocks)
        have = sum(device.capacity_bytes or 0 for device in devices)
        raise ModelError(
            f"layout 'pipeline': no cut into {len(devices)} stage(s) or fewer fits: parameters, gradients and "
            f"optimizer state take {format_bytes(needed)}, activations come on top, and all devices together have "
            f"{format_bytes(have)}. Add a device, take Config(recompute=True) or a smaller micro_batch, or an "
            f"optimizer that keeps less."
        )
    stages = (tuple(_stage(part.device, part.blocks) for part in candidate.parts),)
    step_s = predict_on(problem, candidate).step_s
    size, reason, slices_s = candidate.parts[0].micro_batch, "", 0.0
    if slices is not None:
        other = zero(problem, int(slices[-1]), tuple(range(len(ranks)))).candidate
        slices_s = inf if other is None else predict_on(problem, other).step_s
        reason = f" ({1e3 * slices_s:.4g} ms with layout {slices})"
    return Cut(
        stages=stages,
        samples=(global_batch_size,),
        micro_batch=size,
        reason=f"layout pipeline: stages {text_from_stages(stages)} with micro-batches of {size} are predicted to take "
        f"{1e3 * step_s:.4g} ms a step{reason}, {_of_whole(problem, stages)}",
        step_s=step_s,
        slices_step_s=slices_s,
    )


def _stage(device: str, blocks: tuple[int, int] | None) -> Stage:
    assert blocks is not None
    return Stage(rank=int(device), first=blocks[0], stop=blocks[1])


def _of_whole(problem: Problem, stages: Stages) -> str:
    """What sets the pace."""
    slowest = max(
        (stage for pipeline in stages for stage in pipeline),
        key=lambda stage: _sample_s(problem, stage),
    )
    return f"the stage of rank {slowest.rank} sets the pace"


def _sample_s(problem: Problem, stage: Stage) -> float:
    """Seconds of one sample's forward and backward through a stage."""
    return stage_s(problem, problem.ranks[stage.rank].device, problem.blocks[stage.first : stage.stop], 1)


def _pinned(problem: Problem, stages: Stages, micro_batch: int | None) -> Cut:
    batch, unit = problem.global_batch_size, problem.model.unit
    if len(stages) > -(-batch // unit):
        raise SettingError(
            f"stages = '{text_from_stages(stages)}': {len(stages)} pipelines for {batch} samples in units of {unit}. "
            f"Expected at least one unit for each."
        )
    rates = []
    for pipeline in stages:
        beat_s = max(_sample_s(problem, stage) for stage in pipeline)
        rates.append(1 / max(beat_s, 1e-12))
    num_units = -(-batch // unit)
    units = _in_proportion(num_units, rates)
    samples = [count * unit for count in units]
    samples[-1] -= num_units * unit - batch
    deepest = max(len(pipeline) for pipeline in stages)
    size = micro_batch or max(unit, min(samples) // (4 * deepest) // unit * unit)
    return Cut(
        stages=stages,
        samples=tuple(samples),
        micro_batch=size,
        reason=f"layout pipeline: stages {text_from_stages(stages)}, as configured, with micro-batches of {size}",
    )


def _in_proportion(total: int, rates: Sequence[float]) -> list[int]:
    """At least one each, and each next one to whom it costs least time."""
    counts = [1] * len(rates)
    for _ in range(total - len(rates)):
        soonest = min(range(len(rates)), key=lambda index: ((counts[index] + 1) / rates[index], index))
        counts[soonest] += 1
    return counts
