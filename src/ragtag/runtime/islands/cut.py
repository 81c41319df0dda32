"""A model's numbers as fragments: cut into strips by depth, every P-th strip in the same fragment.

The one idea: the numbers of all parameters, one after the other, are one long row. Strips of equal length are dealt out
in turn, so fragments are of equal size whatever the layers are, and each holds something of every depth (Douillard et
al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512, section 2.1: strided fragments).
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec
import torch

from ragtag.runtime.names import named_parameters

_STRIPS = 4
"""Strips of a fragment."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers `first` to `last` - 1 of a parameter, at `at` of its fragment."""

    parameter: int
    first: int
    last: int
    at: int


class Cut:
    """The fragments of one model, the same on every rank and island.

    Args:
        model: whole on this rank.
        num_fragments: P; fewer where the model has fewer numbers.
    """

    def __init__(self, model: torch.nn.Module, num_fragments: int) -> None:
        named = [(name, each) for name, each in named_parameters(model) if each.is_floating_point()]
        self._parameters = [each for _, each in named]
        sizes = [each.numel() for each in self._parameters]
        total = sum(sizes)
        self.num_fragments = max(1, min(num_fragments, total))
        self._slices = _deal(sizes, self.num_fragments)
        self.numel = tuple(sum(each.last - each.first for each in slices) for slices in self._slices)
        """Numbers in each fragment."""
        outline = [[name, list(each.shape)] for name, each in named]
        self.hash = blake2b(msgspec.json.encode([outline, self.num_fragments, _STRIPS]), digest_size=8).hexdigest()
        """Of names, shapes and cut."""

    def take(self, fragment: int) -> torch.Tensor:
        """A copy of a fragment's numbers, 1-d fp32 in host memory."""
        flat = torch.empty(self.numel[fragment])
        with torch.no_grad():
            for part, values in self._views(fragment):
                flat[part.at : part.at + part.last - part.first].copy_(values)
        return flat

    def add(self, fragment: int, correction: torch.Tensor) -> None:
        """Add to a fragment's numbers, in the parameters' own precision."""
        with torch.no_grad():
            for part, values in self._views(fragment, written=True):
                values += correction[part.at : part.at + part.last - part.first].to(values.device, values.dtype)

    def put(self, fragment: int, numbers: torch.Tensor) -> None:
        """Let a fragment's numbers be these."""
        with torch.no_grad():
            for part, values in self._views(fragment, written=True):
                values.copy_(numbers[part.at : part.at + part.last - part.first])

    def _views(self, fragment: int, *, written: bool = False) -> Iterator[tuple[Slice, torch.Tensor]]:
        for part in self._slices[fragment]:
            parameter = self._parameters[part.parameter]
            flat = parameter.detach().reshape(-1)
            yield part, flat[part.first : part.last]
            if written and flat.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                parameter.copy_(flat.view(parameter.shape))  # one that is not contiguous was copied


def _deal(sizes: Sequence[int], num_fragments: int) -> tuple[tuple[Slice, ...], ...]:
    total = sum(sizes)
    num_strips = min(total, num_fragments * _STRIPS) // num_fragments * num_fragments or 1
    fragments: list[list[Slice]] = [[] for _ in range(num_fragments)]
    filled = [0] * num_fragments
    parameter, begin = 0, 0
    for strip in range(num_strips):
        first, last = total * strip // num_strips, total * (strip + 1) // num_strips
        fragment = strip % num_fragments
        while first < last:
            while begin + sizes[parameter] <= first:
                begin += sizes[parameter]
                parameter += 1
            stop = min(last, begin + sizes[parameter])
            fragments[fragment].append(
                Slice(parameter=parameter, first=first - begin, last=stop - begin, at=filled[fragment])
            )
            filled[fragment] += stop - first
            first = stop
    return tuple(map(tuple, fragments))
