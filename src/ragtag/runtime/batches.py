"""Walk through nested batches: dicts, lists, tuples, named tuples and dataclasses, with tensors somewhere inside.

The one idea: a container is rebuilt as what it was, a tensor is changed, and anything else is the user's own and
passes through.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy
import torch

IGNORED_LABEL = -100
"""The label that torch's and Hugging Face's losses skip: such elements are padding, not tokens."""


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return `batch` with its tensors, and its objects that have a `.to`, on `device`; containers keep their type."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    return map_leaves(batch, move)


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return `batch` with `function` applied to every leaf: whatever is no container, or is one that has a `.to`."""
    if isinstance(batch, torch.Tensor | str | bytes | torch.Size) or _moves_itself(batch):
        return function(batch)
    if isinstance(batch, MutableMapping):
        # A copy keeps what a constructor would not: a default factory, extra attributes.
        rebuilt = copy.copy(batch)
        for key, value in batch.items():
            rebuilt[key] = map_leaves(value, function)
        return rebuilt
    if isinstance(batch, Mapping):
        return {key: map_leaves(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [map_leaves(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, list):
        return [map_leaves(value, function) for value in batch]
    if _is_dataclass_value(batch):
        rebuilt = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Past __setattr__, because the dataclass may be frozen.
            object.__setattr__(rebuilt, field.name, map_leaves(getattr(batch, field.name), function))
        return rebuilt
    return function(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of `batch` in order: tensors, arrays, numbers, strings, None and objects of unknown kinds."""
    if isinstance(batch, torch.Tensor | str | bytes | torch.Size):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from leaves(value)
    elif _is_dataclass_value(batch):
        for field in dataclasses.fields(batch):
            yield from leaves(getattr(batch, field.name))
    else:
        yield batch


def size_of(sample: Any) -> int:
    """Return how much there is in `sample`, as a stand-in for its number of tokens.

    Elements of tensors and arrays, less ignored labels (-100); characters of a string; one for any other object, none
    for None.
    """
    return sum(_size_of_leaf(leaf) for leaf in leaves(sample))


def _size_of_leaf(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        whole = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
        return leaf.numel() - (int((leaf == IGNORED_LABEL).sum()) if whole else 0)
    if isinstance(leaf, numpy.ndarray):
        return leaf.size - (int((leaf == IGNORED_LABEL).sum()) if leaf.dtype.kind == "i" else 0)
    if isinstance(leaf, str | bytes):
        return len(leaf)
    return 0 if leaf is None or (isinstance(leaf, int) and leaf == IGNORED_LABEL) else 1


def _moves_itself(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def _is_dataclass_value(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
