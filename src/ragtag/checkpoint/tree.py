"""Take a tree of state apart into named tensors and a JSON skeleton, and put it together again. No pickle anywhere.

The one idea: the skeleton says everything but the tensors' values, so it can lie in a file's header or travel to
another rank, and reading it can only ever build dicts, lists, numbers and strings.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from ragtag.checkpoint.parts import Described
from ragtag.core.errors import CheckpointError

_MAPPINGS = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
_SEQUENCES = {"list": list, "tuple": tuple}
_TAGS = {kind: tag for tag, kind in (_MAPPINGS | _SEQUENCES).items()}
_LARGEST_PLAIN_INT = 1 << 63  # many JSON readers go no further, and Python's own stops at 4300 digits
_NUMPY_KINDS = "biuf"


def flatten(tree: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Return (skeleton as JSON, tensors by name): nested dict, OrderedDict, Counter, list and tuple with leaves inside.

    Leaves are tensors, None, bool, int, float (nan and inf too), str, bytes and NumPy scalars; keys are str or int. A
    tensor's name is its path joined with dots; dots and backslashes in keys are escaped with a backslash. Tensors are
    detached but neither copied nor moved; those that are the same memory (tied weights) appear once and are tied
    again by `unflatten`.

    Raises:
        CheckpointError: a leaf or key of another type, with its path.
    """
    skeleton, found = flatten_described(tree)
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
    assert len(tensors) == len(found), "what is only described has no values to send or keep"
    return skeleton, tensors


def flatten_described(tree: Any) -> tuple[str, dict[str, torch.Tensor | Described]]:
    """Do as `flatten`, where tensors may be described only.

    Raises:
        CheckpointError: a leaf or key of another type, with its path.
    """
    walk = _Flatten()
    try:
        skeleton = walk.node(tree, ())
    except RecursionError:
        raise CheckpointError("the state to save contains itself or is nested too deeply. Remove the cycle.") from None
    return json.dumps(skeleton, allow_nan=False, separators=(",", ":")), walk.tensors


def unflatten(skeleton: str, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `flatten` took apart; the tensors, or what is given in their place, are used as they are.

    Raises:
        CheckpointError: the skeleton is damaged, or names a tensor that is not in `tensors`.
    """
    try:
        return _build(json.loads(skeleton), tensors)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the skeleton of the saved state is damaged: {error}") from error


def filled(tree: Any, tensors: Mapping[Described, torch.Tensor]) -> Any:
    """Return `tree` with tensors in place of those that are described and in `tensors`."""
    skeleton, found = flatten_described(tree)
    return unflatten(
        skeleton,
        {name: tensors.get(each, each) if isinstance(each, Described) else each for name, each in found.items()},
    )


class _Flatten:
    """One walk over a tree: the tensors met so far, by name, and the names of memory already seen."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor | Described] = {}
        self._names: dict[Any, str] = {}

    def node(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _LARGEST_PLAIN_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if kind in _MAPPINGS.values():
            items = [[self._key(key, path), self.node(item, (*path, _escape(key)))] for key, item in value.items()]
            return {_TAGS[kind]: items}
        if kind in _SEQUENCES.values():
            return {_TAGS[kind]: [self.node(item, (*path, str(index))) for index, item in enumerate(value)]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if kind is Described:
            return {"tensor": self._described(value, path)}
        if isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS and value.itemsize <= 8:
            return {"numpy": [value.dtype.name, self.node(value.item(), path)]}
        raise CheckpointError(
            f"{_where(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. Turn it into "
            f"tensors, numbers, strings, lists, tuples or dicts in `state_dict` (and back in `load_state_dict`)."
        )

    def _key(self, key: Any, path: tuple[str, ...]) -> str | int:
        if type(key) in (str, int):
            return key
        raise CheckpointError(
            f"{_where(path)} has the key {key!r} of type {type(key).__qualname__}; a checkpoint's keys are str or int."
        )

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            obstacle = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
        elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            obstacle = f"a tensor with layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}"
        else:
            view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            memory = (tensor.device, tensor.data_ptr(), *view)
            if tensor.numel() and memory in self._names:
                return self._names[memory]
            name = self._names[memory] = _tensor_name(path)
            self.tensors[name] = tensor.detach()
            return name
        raise CheckpointError(f"{_where(path)} is {obstacle}; a checkpoint holds plain dense tensors only.")

    def _described(self, value: Described, path: tuple[str, ...]) -> str:
        if value.numel and value in self._names:
            return self._names[value]
        name = self._names[value] = _tensor_name(path)
        self.tensors[name] = value
        return name


def _escape(key: Any) -> str:
    if not isinstance(key, str):
        return str(key)
    text = key.replace("\\", "\\\\").replace(".", "\\.").encode("utf-8", "backslashreplace").decode("utf-8")
    # 0 and "0" may both be keys of one dict.
    return "\\" + text if re.fullmatch(r"-?\d+", text, re.ASCII) else text


def _tensor_name(path: tuple[str, ...]) -> str:
    name = ".".join(path) or "tensor"
    return "\\" + name if name == "__metadata__" else name  # which safetensors keeps for itself


def _where(path: tuple[str, ...]) -> str:
    return f"the state at '{'.'.join(path)}'" if path else "the state"


def _build(node: Any, tensors: Mapping[str, Any]) -> Any:
    if not isinstance(node, dict | list):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointError(f"the skeleton of the saved state has an unknown node {str(node)[:80]}")
    [(tag, content)] = node.items()
    if tag == "tensor":
        if content not in tensors:
            raise CheckpointError(f"the saved state lacks the tensor '{content}'")
        return tensors[content]
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({key: _build(item, tensors) for key, item in content})
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_build(item, tensors) for item in content)
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float(content)
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "numpy" and numpy.dtype(content[0]).kind in _NUMPY_KINDS:
        return numpy.dtype(content[0]).type(_build(content[1], tensors))
    raise CheckpointError(f"the skeleton of the saved state has an unknown kind of node, '{tag}'")
