"""Which layout a run takes, and how large each rank's slice is.

The one idea: the cheapest layout that fits every device; the sizes of slices follow free memory, never speed.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import psutil
import torch

from ragtag.comm.group import Group
from ragtag.control.layout import Chosen, Needs, Room, choose
from ragtag.core.config import Config
from ragtag.core.errors import ModelError, SettingError
from ragtag.emulate.memory import MemoryCap, MemoryLimit
from ragtag.runtime.blocks import Listing, find_blocks
from ragtag.runtime.zero.elementwise import state_tensors_per_element


def choose_layout(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    config: Config,
    memory: MemoryLimit,
    device: torch.device,
    objects: Mapping[str, Any],
) -> Chosen:
    """Return the layout, the same on every rank; a call of the group.

    Args:
        objects: what is registered in `state`.

    Raises:
        SettingError: sizes of slices are pinned for ranks that come and go.
        ModelError: the model fits under no layout, or not under the one that is pinned.
    """
    if group.world_size == 1 and not group.elastic:
        return Chosen()
    if group.elastic and config.slices is not None:
        raise SettingError("slices are for a fixed number of ranks; with ragtag launch, add --fixed.")
    if group.elastic and config.layout == "pipeline":
        raise SettingError("layout 'pipeline' is for a fixed number of ranks; with ragtag launch, add --fixed.")
    if config.stages is not None and config.layout != "pipeline":
        raise SettingError(f"stages are set, but layout is '{config.layout}'. Set Config(layout='pipeline') too.")
    own = Room(capacity_bytes=capacity_bytes(group, memory, device), counts_copies=not isinstance(memory, MemoryCap))
    rooms = [msgspec.convert(each, Room) for each in group.gather("memory", msgspec.to_builtins(own))]
    chosen = choose(
        needs_of(model, optimizer, config.blocks),
        rooms,
        group.hosts,
        layout=config.layout,
        slices=config.slices,
    )
    if chosen.name in ("zero3", "pipeline"):
        _check_objects(objects, chosen.name)
    return chosen


def _check_objects(objects: Mapping[str, Any], layout: str) -> None:
    """Raise ModelError for averages of parameters, which the script makes from whole ones."""
    for name, item in objects.items():
        if isinstance(item, torch.nn.Module) and any(True for _ in item.parameters()):
            raise ModelError(
                f"state['{name}'] holds parameters of its own, such as an average of the model's; with layout "
                f"'{layout}' the script never sees these whole. Take Config(layout='zero2'), which leaves them whole."
            )


def needs_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, listed: Listing | None = None) -> Needs:
    """Return what the model's state takes."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    blocks, _ = find_blocks(model, listed)
    block_bytes = [sum(p.nbytes for p in block.parameters()) for _, block in blocks]
    whole = sum(p.nbytes for p in parameters)
    return Needs(
        parameter_bytes=whole,
        gradient_bytes=sum(p.numel() * max(4, p.element_size()) for p in trained),
        optimizer_bytes=round(state_tensors_per_element(optimizer) * sum(p.nbytes for p in trained)),
        largest_block_bytes=max(block_bytes, default=0),
        rest_bytes=max(0, whole - sum(block_bytes)),
    )


def capacity_bytes(group: Group, memory: MemoryLimit, device: torch.device) -> int:
    """Return what this rank's device may hold, in bytes."""
    if isinstance(memory, MemoryCap):
        return memory.cap_bytes
    if device.type != "cpu":
        try:
            return int(torch.get_device_module(device).mem_get_info(device)[0])
        except (RuntimeError, AttributeError):
            pass
    return psutil.virtual_memory().available // group.hosts.count(group.hosts[group.rank])
