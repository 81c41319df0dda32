"""The bytes of a safetensors file: what lies where, written and read in parts.

The one idea: places follow from shapes and dtypes alone, so a file can be begun before any tensor is there. What is
known last, the checksums, has room in the header, which is written last; until then the file is no safetensors file.

A file is: the header's length (8 bytes, little-endian), the header (JSON, padded with spaces), and the tensors' values
end to end, little-endian, row by row (https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ragtag.checkpoint.parts import Described

HEADER_LIMIT_BYTES = 100_000_000
"""Readers refuse longer ones."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Place(NamedTuple):
    """Where a tensor lies among the values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """In bytes from the first value on."""
    stop: int


def has_name(dtype: torch.dtype) -> bool:
    """Whether the format has tensors of that kind."""
    return dtype in _NAMES


def places_of(tensors: Mapping[str, torch.Tensor | Described]) -> dict[str, Place]:
    """Return where each goes, in that order: larger elements first, so that each begins at a multiple of its size."""
    places: dict[str, Place] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        dtype, shape = tensors[name].dtype, tuple(tensors[name].shape)
        start, offset = offset, offset + math.prod(shape) * dtype.itemsize
        places[name] = Place(dtype, shape, start, offset)
    return places


def header_of(places: Mapping[str, Place], metadata: Mapping[str, str], *, room: int | None = None) -> bytes:
    """Return the file's beginning, up to the first value.

    Args:
        metadata: what else is to be in it.
        room: bytes that it takes, if it has been said; at least as many as it needs.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, (dtype, shape, start, stop) in places.items():
        described[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, stop)}
    text = json.dumps(described, separators=(",", ":")).encode()
    length = len(text) + -len(text) % 8 if room is None else room - 8
    assert length >= len(text), "the header has the room that was kept for it"
    return length.to_bytes(8, "little") + text.ljust(length)


def read_header(file: Any, size: int) -> tuple[dict[str, str], dict[str, Place], int]:
    """Return metadata, places in their order, and where in `file`, which has `size` bytes, the first value is.

    Raises:
        ValueError: it is no safetensors file, or not a whole one.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(HEADER_LIMIT_BYTES, size - 8):
        raise ValueError("it does not begin as a safetensors file does, or ends too early")
    try:
        described = json.loads(file.read(length).decode("utf-8"))
        metadata = described.pop("__metadata__", {})
        places = [(name, _place(each)) for name, each in described.items()]
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata are texts")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__}: {error})") from None
    places.sort(key=lambda each: (each[1].start, each[1].stop))
    end = 0
    for name, place in places:
        if place.start != end:
            raise ValueError(f"its header leaves a hole, or an overlap, before the tensor '{name}'")
        end = place.stop
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes where its header says {8 + length + end}")
    return metadata, dict(places), 8 + length


def _place(described: Any) -> Place:
    dtype, shape = _DTYPES[described["dtype"]], tuple(described["shape"])
    start, stop = described["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("sizes are whole numbers")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{shape} of {dtype} does not take {stop - start} bytes")
    return Place(dtype, shape, start, stop)
