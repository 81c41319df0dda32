"""A tensor in parts: what stands for it in a tree while its content comes, or goes, a few megabytes at a time.

The one idea: where a tensor lies in a file and how large it is are known before its values are, so a state that no
single machine could hold is written, read and sent with room for one part.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

PART_BYTES = 16 << 20
"""Most bytes of one part: four messages of the ring, so that links stay full, and little beside any model."""


class Described:
    """A tensor that is not here. Equal to itself only: in two places of a tree it is one memory, as tied weights are.

    Args:
        shape: of the tensor.
        dtype: its own.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Iterable[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def empty(self) -> torch.Tensor:
        """Return memory for it, in this machine's."""
        return torch.empty(self.shape, dtype=self.dtype)


class Part(NamedTuple):
    """Some elements of a tensor. The parts of one tensor follow on each other."""

    of: Described
    first: int
    """Of the flattened tensor's elements."""
    values: torch.Tensor
    """1-D, in this machine's memory."""


def spans(first: int, last: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut elements `first` to `last` (the one after) of `itemsize` bytes each into runs of at most `PART_BYTES`."""
    length = max(1, PART_BYTES // itemsize)
    for start in range(first, last, length):
        yield start, min(last, start + length)


def batches(tensors: Mapping[str, Described]) -> Iterator[list[tuple[str, int, int]]]:
    """Cut all of `tensors` into spans (name, first element, the one after the last), and put those together that have
    room in `PART_BYTES`: what is sent at a time. Tensors without elements have no span."""
    batch: list[tuple[str, int, int]] = []
    room = PART_BYTES
    for name, tensor in tensors.items():
        itemsize = tensor.dtype.itemsize
        for first, last in spans(0, tensor.numel, itemsize):
            size = (last - first) * itemsize
            if batch and size > room:
                yield batch
                batch, room = [], PART_BYTES
            batch.append((name, first, last))
            room -= size
    if batch:
        yield batch
