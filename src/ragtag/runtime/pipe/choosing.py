"""How a run's model is cut into stages: what ranks find out about it before it is cut.

The one idea: the model is still whole in every rank's host memory then, so trying it, timing its blocks and counting
their bytes needs no pipeline; what all ranks found goes to the planner, and all of them take its answer.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ragtag.comm.group import Group
from ragtag.control.layout import Chosen
from ragtag.control.stages import Cut, choose_cut
from ragtag.core.config import Config
from ragtag.core.errors import ModelError, RagtagError
from ragtag.core.profile import Block, DeviceProfile, LinkProfile, Memory, ModelFacts, Timing
from ragtag.core.stages import check_stages, stages_from_text
from ragtag.core.values import Layout
from ragtag.cost.problem import emulated_timings
from ragtag.emulate.environment import Emulator
from ragtag.emulate.memory import counting
from ragtag.profile.links import links_between
from ragtag.runtime.batches import to_device
from ragtag.runtime.block_probe import measure_blocks
from ragtag.runtime.blocks import NamedBlocks, find_blocks, recomputing
from ragtag.runtime.loss import as_loss
from ragtag.runtime.pipe.trying import try_stages
from ragtag.runtime.pipe.users import Traced, refused
from ragtag.runtime.precision import autocast
from ragtag.runtime.trial import Nature
from ragtag.runtime.zero.choosing import needs_of


class Found(NamedTuple):
    """What a pipeline is made from."""

    blocks: NamedBlocks
    traced: Traced
    cut: Cut
    forward: tuple[float, ...]
    """Each block's part of the time of the whole model's forward and backward, in forward."""
    backward: tuple[float, ...]
    """And in backward; all of both together are 1."""


def choose_stages(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Any], Any],
    samples: Callable[[], list[Any]],
    collate: Callable[[list[Any]], Any],
    *,
    nature: Nature,
    unit: int,
    global_batch_size: int,
    capacity_bytes: int,
    precision: str,
    group: Group,
    config: Config,
    emulator: Emulator | None,
    recompute: bool,
    slices: Layout | None = None,
) -> Found:
    """Try the model, time its blocks, and cut it; a call of the group.

    Args:
        samples: gives a few of step 1.
        nature: what the loss was found to be.
        capacity_bytes: of this rank's device.
        slices: the layout that would be taken else, whose step is predicted too.

    Raises:
        ModelError: the model cannot be cut, or fits under no cut.
        SettingError: the stages that are set are not of this model.
    """
    if nature.draws_random_numbers or nature.changed_buffers:
        raise refused(
            "forward draws random numbers (dropout)"
            if nature.draws_random_numbers
            else f"forward changes the buffer '{nature.changed_buffers[0]}'"
        )
    blocks, why_not = find_blocks(model, config.blocks)
    if not blocks:
        raise refused(why_not)

    chosen = samples()
    device, count = next(iter(model.parameters())).device, len(chosen)
    batch = to_device(collate(chosen), device)
    cast = partial(autocast, precision, device)

    def loss() -> torch.Tensor:
        with cast():
            return as_loss(loss_fn(model, batch), num_samples=count).total

    traced = _tried(model, blocks, loss, group)
    with recomputing(blocks, active=recompute):
        own_blocks, seconds = _timed(model, blocks, loss, count, cast, optimizer)
    told = group.gather("blocks", [msgspec.to_builtins(each) for each in own_blocks])[0]
    host = group.hosts[group.rank] if emulator is None else emulator.device.host
    timings = (Timing(samples=count, seconds=seconds),)
    if emulator is not None and emulator.cluster.emulation.sample_s is not None:
        timings = emulated_timings(emulator.cluster.emulation, emulator.device.speed)
    common = tuple(msgspec.convert(each, Block) for each in told)
    needs = needs_of(model, optimizer, config.blocks)
    memory = Memory(
        fixed_bytes=needs.parameter_bytes + needs.gradient_bytes + needs.optimizer_bytes,
        per_sample_bytes=sum(block.activation_bytes for block in common),
    )
    own = DeviceProfile(name=str(group.rank), host=host, timings=timings, capacity_bytes=capacity_bytes, memory=memory)
    devices = [
        msgspec.convert(each, DeviceProfile) for each in group.gather("device profile", msgspec.to_builtins(own))
    ]
    pinned = None
    if config.stages is not None:
        pinned = stages_from_text(config.stages)
        check_stages(pinned, world_size=group.world_size, num_blocks=len(blocks))
    facts = ModelFacts(
        name=type(model).__name__,
        shape_hash="",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=needs.parameter_bytes,
        gradient_bytes=needs.gradient_bytes,
        optimizer_bytes=needs.optimizer_bytes,
        unit=unit,
    )
    known: Sequence[LinkProfile] = ()
    if emulator is not None:
        known = _links_of(emulator)
    elif len(set(group.hosts)) > 1:
        known = links_between(group, group.hosts)
    # Times differ a little from rank to rank: what rank 0 makes of them is everybody's.
    cut: Cut | None = None
    error: RagtagError | None = None
    try:
        cut = choose_cut(
            devices,
            known,
            common,
            facts,
            global_batch_size=global_batch_size,
            micro_batch=config.micro_batch,
            pinned=pinned,
            slices=slices,
        )
    except RagtagError as failed:
        error = failed
    said = group.gather("stages", None if cut is None else msgspec.to_builtins(cut))[0]
    if said is None or cut is None:
        raise error or ModelError("layout 'pipeline': rank 0 found no cut into stages.")
    cut = msgspec.convert(said, Cut)
    check_stages(cut.stages, world_size=group.world_size, num_blocks=len(blocks))
    return Found(blocks, traced, cut, *_parts(common, [name for name, _ in blocks]))


def quicker_than_slices(chosen: Chosen, choose: Callable[..., Found]) -> tuple[Found | None, str]:
    """Return a pipeline that is predicted to be quicker than the slices that were `chosen` for their memory, or none;
    and what is to be said about it. A call of the group.

    Args:
        choose: `choose_stages`, but for `slices`.
    """
    try:
        found = choose(slices=chosen.name)
    except ModelError:
        return None, f"{chosen.reason}; the model cannot be cut into stages"
    if found.cut.is_quicker:
        return found, ""
    said = f"{1e3 * found.cut.step_s:.4g} ms a step, slices {1e3 * found.cut.slices_step_s:.4g} ms"
    return None, f"{chosen.reason}; a pipeline is predicted to take {said}"


def _tried(model: nn.Module, blocks: NamedBlocks, loss: Callable[[], torch.Tensor], group: Group) -> Traced:
    """Rank 0 tries; everybody learns what it found."""
    said: Any = None
    if group.rank == 0:
        group.note(0, "trying to cut the model into stages")
        try:
            traced = try_stages(model, blocks, loss)
            said = [[sorted(users) for users in traced.users], list(traced.returns_tuple)]
        except ModelError as error:
            said = [[], str(error)]
    users, returns_tuple = group.gather("uses of parameters", said)[0]
    if isinstance(returns_tuple, str):
        error = ModelError(returns_tuple)
        error.origin_rank = 0
        raise error
    return Traced([frozenset(each) for each in users], returns_tuple)


def _timed(
    model: nn.Module,
    blocks: NamedBlocks,
    loss: Callable[[], torch.Tensor],
    samples: int,
    cast: Callable[[], AbstractContextManager[None]],
    optimizer: torch.optim.Optimizer,
) -> tuple[tuple[Block, ...], float]:
    """Return times and bytes of the blocks, and the seconds of one forward and backward of the whole model."""
    device = next(iter(model.parameters())).device
    factor = 2.0**-10
    try:
        with counting(model, optimizer) as counter:
            measured, why_not = measure_blocks(
                model,
                blocks,
                lambda: loss() * factor,
                samples=samples,
                device=device,
                autocast=cast,
                counter=counter,
                sample_s=None,
            )
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    if not measured:
        raise refused(why_not)
    return measured, samples * sum(block.forward_s + block.backward_s for block in measured)


def _links_of(emulator: Emulator) -> list[LinkProfile]:
    return [
        LinkProfile(
            between=link.between,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_s=link.latency_s,
        )
        for link in emulator.cluster.links
        if link.bandwidth_bytes_per_s is not None
    ]


def _parts(measured: Sequence[Block], names: Sequence[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Each block's parts of forward and backward; what is outside of blocks goes with the first and the last one."""
    forward, backward = [0.0] * len(names), [0.0] * len(names)
    at = {name: index for index, name in enumerate(names)}
    index = 0
    for block in measured:
        index = at.get(block.name, index)
        forward[index] += block.forward_s
        backward[index] += block.backward_s
    whole = sum(forward) + sum(backward)
    return tuple(each / whole for each in forward), tuple(each / whole for each in backward)
