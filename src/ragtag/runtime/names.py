"""Parameters and buffers by the names they have in the bare model.

`torch.compile` puts `_orig_mod.` into names. Whether a rank compiles is its own business: without that word, ranks
compare, checkpoints load and errors read the same with and without.
"""

from collections.abc import Iterator

import torch


def plain_name(name: str) -> str:
    """`name` without what `torch.compile` adds to it."""
    return name.replace("_orig_mod.", "")


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter once, tied ones under their first name."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer once."""
    for name, buffer in model.named_buffers():
        yield plain_name(name), buffer


def buffer_owners(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """The module that holds each buffer, and the buffer's name in it: forward may put another tensor there."""
    owners: dict[str, tuple[torch.nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            owners[plain_name(f"{prefix}.{key}" if prefix else key)] = (module, key)
    return owners
