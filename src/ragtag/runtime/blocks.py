"""The model's blocks: where activations can be recomputed, and between which a pipeline can be cut.

The one idea: a block is a child of the `nn.Sequential` or `nn.ModuleList` that holds most of the model; what runs
before the first one and after the last one is a block as well, by name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ragtag.core.errors import ModelError

NamedBlocks = Sequence[tuple[str, nn.Module]]
Listing = Callable[[nn.Module], Sequence[nn.Module]]

_LEAST_PART = 0.5
"""Of the model's parameters, that the children together must hold."""


def find_blocks(model: nn.Module, listed: Listing | None = None) -> tuple[NamedBlocks, str]:
    """Return (name, module) of each block in order, or none and the reason.

    Of the containers with at least half of the parameters, the one with the most children that have parameters.

    Args:
        listed: lists the blocks, instead.

    Raises:
        ModelError: what it lists are not modules of the model, each once.
    """
    if listed is not None:
        return _named(model, listed), ""
    if hasattr(model, "_orig_mod"):
        return (), "the model is compiled, which fixes where its blocks end"
    total = sum(parameter.numel() for parameter in model.parameters())
    best: NamedBlocks = ()
    for path, container in model.named_modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList):
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in container.named_children()]
        held = {id(p): p.numel() for _, child in children for p in child.parameters()}
        if sum(held.values()) >= _LEAST_PART * total and _num_trained(children) > max(1, _num_trained(best)):
            best = children
    if not best:
        return (), "no nn.Sequential or nn.ModuleList of two or more blocks holds half of the model's parameters"
    return best, ""


def _named(model: nn.Module, listed: Listing) -> NamedBlocks:
    names = {id(module): name for name, module in model.named_modules()}
    try:
        blocks = list(listed(model))
    except Exception as error:
        raise ModelError(f"blocks: the function failed: {type(error).__name__}: {error}") from error
    seen: dict[int, str] = {}
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module) or id(block) not in names:
            raise ModelError(
                f"blocks: number {index} of the list is a {type(block).__name__} that is no module of the model. List "
                f"the model's own modules, in the order in which they run: blocks=lambda model: list(model.layers)."
            )
        for module in block.modules():
            if id(module) in seen:
                raise ModelError(
                    f"blocks: '{names[id(block)]}' and '{seen[id(module)]}' both hold '{names[id(module)]}'. List each "
                    f"module once, and no module inside of another."
                )
            seen[id(module)] = names[id(block)]
    if len(blocks) < 2:
        raise ModelError(f"blocks: the function lists {len(blocks)} block(s). A model is cut between two of them.")
    return [(names[id(block)], block) for block in blocks]


def _num_trained(blocks: NamedBlocks) -> int:
    return sum(any(True for _ in block.parameters()) for _, block in blocks)


@contextmanager
def recomputing(blocks: NamedBlocks, *, active: bool = True) -> Iterator[None]:
    """Keep only each block's inputs in forward, and run its forward again in backward (Chen et al. 2016, "Training Deep
    Nets with Sublinear Memory Cost")."""
    if not active:
        yield
        return
    modules = list({id(block): block for _, block in blocks}.values())
    previous = [block.__dict__.get("forward") for block in modules]
    for block in modules:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, forward in zip(modules, previous):
            if forward is None:
                del block.__dict__["forward"]
            else:
                block.forward = forward


def parameters_around(model: nn.Module, blocks: NamedBlocks, called_before: set[int]) -> tuple[int, int]:
    """Return the bytes of parameters that belong to no block: used before the first one, and after the last one.

    Args:
        model: the whole model.
        blocks: its blocks.
        called_before: ids of the modules whose forward began before the first block's. Parameters of modules that are
            never called count as before.
    """
    inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    before = after = 0
    seen = set(inside)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                if id(module) in called_before:
                    before += _bytes_of(parameter)
                else:
                    after += _bytes_of(parameter)
    return before, after


def bytes_of_parameters(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(_bytes_of(parameter) for parameter in module.parameters())


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
