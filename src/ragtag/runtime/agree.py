"""Do all ranks train the same model on the same data with the same settings? Ask before the first step, name the first
difference.

Every rank writes down a fingerprint, reads all the others', and runs the same pure comparison, so all raise the same
error.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ragtag.core.errors import DisagreementError
from ragtag.runtime.batches import leaves
from ragtag.runtime.names import named_buffers, named_parameters

Fingerprint = Mapping[str, Any]


def fingerprint(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sample: Callable[[int], Any],
    dataset_size: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What must be equal on all ranks, as JSON: tensors by name, optimizer, data, settings."""
    indices = sorted({0, dataset_size // 2, dataset_size - 1})
    return {
        "parameters": [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in named_parameters(model)],
        "buffers": [[name, list(b.shape), str(b.dtype)] for name, b in named_buffers(model)],
        "optimizer": type(optimizer).__name__,
        "groups": [_group_settings(group) for group in optimizer.param_groups],
        "dataset_size": dataset_size,
        "samples": [[index, hash_of(sample(index))] for index in indices],
        "settings": {name: _plain(value) for name, value in settings.items()},
    }


def compare(fingerprints: Sequence[Fingerprint], hosts: Sequence[str]) -> None:
    """Raise DisagreementError with the first difference between any rank and rank 0."""
    first = fingerprints[0]
    for rank, other in enumerate(fingerprints):
        if other != first:
            error = DisagreementError(
                f"rank {rank} ({hosts[rank]}) was started differently from rank 0 ({hosts[0]}): "
                f"{_difference(first, other)}"
            )
            error.origin_rank = 0
            raise error


def _difference(first: Fingerprint, other: Fingerprint) -> str:
    for kind, noun in (("parameters", "parameter"), ("buffers", "buffer")):
        if first[kind] != other[kind]:
            return _tensor_difference(noun, first[kind], other[kind])
    if first["optimizer"] != other["optimizer"]:
        return f"optimizer {other['optimizer']}, not {first['optimizer']}. Use the same optimizer on every rank."
    if first["groups"] != other["groups"]:
        for index, (a, b) in enumerate(zip(first["groups"], other["groups"])):
            for key in sorted({*a, *b}):
                if a.get(key) != b.get(key):
                    return f"optimizer group {index} has {key}={b.get(key)}, not {a.get(key)}. Use the same value."
        return f"{len(other['groups'])} optimizer groups, not {len(first['groups'])}."
    if first["dataset_size"] != other["dataset_size"]:
        return (
            f"its dataset has {other['dataset_size']} samples, not {first['dataset_size']}. Every rank needs the whole "
            f"dataset: remove any per-rank sharding, ragtag does it."
        )
    for (index, a), (_, b) in zip(first["samples"], other["samples"]):
        if a != b:
            return (
                f"dataset[{index}] is another sample than on rank 0. Check that both read the same files in the same "
                f"order (sort directory listings), and that random transforms draw from torch, numpy or random."
            )
    for name in sorted({*first["settings"], *other["settings"]}):
        a, b = first["settings"].get(name), other["settings"].get(name)
        if a != b:
            return f"{name} is {b!r}, not {a!r}. Use the same value on every rank."
    return "fingerprints differ"


def _tensor_difference(noun: str, first: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> str:
    here, there = {row[0]: row[1:] for row in first}, {row[0]: row[1:] for row in other}
    for name in here:
        if name not in there:
            return f"it has no {noun} '{name}'. Build the same model on every rank."
    for name in there:
        if name not in here:
            return f"it has a {noun} '{name}' that rank 0 does not have. Build the same model on every rank."
    for name, row in here.items():
        for what, a, b in zip(("shape", "dtype", "requires_grad"), row, there[name]):
            if a != b:
                return f"{noun} '{name}' has {what} {_shown(b)}, not {_shown(a)}. Build the same model on every rank."
    return f"its {noun}s are registered in another order. Build the same model on every rank."


def _shown(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: _plain(value) for key, value in group.items() if key != "params"}
    settings["number of parameters"] = len(group["params"])
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return type(value).__name__


def hash_of(sample: Any) -> int:
    """A crc32 of the numbers and strings in a nested sample; other objects count by their type only."""
    crc = 0
    for leaf in leaves(sample):
        if isinstance(leaf, torch.Tensor):
            text = f"{tuple(leaf.shape)}{leaf.dtype}"
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        elif hasattr(leaf, "tobytes") and hasattr(leaf, "shape"):
            text = f"{leaf.shape}{leaf.dtype}"
            data = b"" if leaf.dtype.hasobject else leaf.tobytes()  # else addresses, other ones in every process
        elif isinstance(leaf, bool | int | float | complex | str | bytes) or leaf is None:
            text, data = repr(leaf), b""
        else:
            text, data = type(leaf).__name__, b""
        crc = zlib.crc32(data, zlib.crc32(text.encode(), crc))
    return crc
