"""Each block of the model by itself: its time, what it keeps for backward, and what it hands on.

The one idea: one forward of the whole model shows what goes into each block; then each is run alone on that. Time and
bytes that are in no block belong to what comes before the first or after the last one.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn

from ragtag.core.profile import AFTER_BLOCKS, BEFORE_BLOCKS, Block
from ragtag.emulate.memory import MemoryCap
from ragtag.profile.statistics import half_spread
from ragtag.runtime.batches import leaves, map_leaves
from ragtag.runtime.blocks import NamedBlocks, bytes_of_parameters, parameters_around

_REPETITIONS = 5
_LEAST_PART = 0.01
"""What comes before or after the blocks is no block of its own below this part of the time, unless it has
parameters."""


class _Trace:
    """One forward and backward of the whole model: when blocks begin and end, and with what they are called."""

    def __init__(self, model: nn.Module, blocks: NamedBlocks, counter: MemoryCap, now: Callable[[], float]) -> None:
        self._model, self._blocks, self._counter, self._now = model, blocks, counter, now
        self.calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {name: [] for name, _ in blocks}
        self.order: list[str] = []
        self.after: set[int] = set()
        """Ids of modules whose forward began after the last block's end."""
        self.start_s = self.entered_s = self.left_s = self.forward_s = self.end_s = 0.0
        self.start_bytes = self.entered_bytes = self.left_bytes = self.forward_bytes = 0

    def run(self, loss: Callable[[], torch.Tensor]) -> None:
        hooks = [module.register_forward_pre_hook(self._any) for module in self._model.modules()]
        for index, (name, block) in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._before(name, index == 0), with_kwargs=True))
        hooks.append(self._blocks[-1][1].register_forward_hook(self._left))
        try:
            with self._counter.forward_backward():
                self.start_s, self.start_bytes = self._now(), self._counter.used_bytes
                total = loss()
                self.forward_s, self.forward_bytes = self._now(), self._counter.used_bytes
                total.backward()
                self.end_s = self._now()
        finally:
            for hook in hooks:
                hook.remove()

    def _any(self, module: nn.Module, inputs: Any) -> None:
        if self.left_s:
            self.after.add(id(module))

    def _before(self, name: str, first: bool) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
            if self.forward_s:
                return  # in backward, where activations are computed again
            if first and not self.calls[name]:
                self.entered_s, self.entered_bytes = self._now(), self._counter.used_bytes
            self.order.append(name)
            self.calls[name].append((map_leaves(inputs, _detached), map_leaves(words, _detached)))

        return hook

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.left_s, self.left_bytes = self._now(), self._counter.used_bytes


def measure_blocks(
    model: nn.Module,
    blocks: NamedBlocks,
    loss: Callable[[], torch.Tensor],
    *,
    samples: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    counter: MemoryCap,
    sample_s: float | None,
) -> tuple[tuple[Block, ...], str]:
    """Return the blocks in forward order, or none and the reason. Gradients are left behind.

    Args:
        model: the whole model.
        blocks: what `find_blocks` found.
        loss: one forward of the whole model on `samples` samples, to a scalar.
        samples: in the micro-batch.
        device: where it runs.
        autocast: makes the run's autocast region.
        counter: counts what is kept for backward; attached to the model.
        sample_s: forward and backward of a sample on this device; all blocks together are given this time, whatever
            the machine did meanwhile. None: what was measured.
    """

    def now() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter()

    whole = [_Trace(model, blocks, counter, now) for _ in range(_REPETITIONS)]
    for trace in whole:
        trace.run(loss)
    trace = whole[-1]
    odd = next((name for name, calls in trace.calls.items() if len(calls) != 1), None)
    if odd is not None:
        return (), f"block '{odd}' ran {len(trace.calls[odd])} times in one forward, not once"
    if trace.order != [name for name, _ in blocks]:
        return (), f"blocks do not run in their order: '{trace.order[0]}' is first"
    found = []
    for name, block in blocks:
        inputs, words = trace.calls[name][0]
        try:
            found.append(_measure(name, block, inputs, words, samples, autocast, counter, now))
        except _NoGradient:
            return (), f"block '{name}' gives nothing that has a gradient"
    measured = _with_rest(model, blocks, found, whole, samples)
    return measured if sample_s is None else _scaled(measured, sample_s), ""


class _NoGradient(Exception):
    pass


def _measure(
    name: str,
    block: nn.Module,
    inputs: tuple[Any, ...],
    words: dict[str, Any],
    samples: int,
    autocast: Callable[[], AbstractContextManager[None]],
    counter: MemoryCap,
    now: Callable[[], float],
) -> Block:
    forwards, backwards, activation_bytes, output_bytes = [], [], 0, 0
    for _ in range(_REPETITIONS + 1):  # the first one warms up
        own, own_words = map_leaves(inputs, _differentiable), map_leaves(words, _differentiable)
        with counter.forward_backward():
            kept_bytes = counter.used_bytes
            started_s = now()
            with autocast():
                output = block(*own, **own_words)
            forward_s = now() - started_s
            activation_bytes = counter.used_bytes - kept_bytes
            results = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
            output_bytes = sum(leaf.numel() * leaf.element_size() for leaf in results)
            results = [leaf for leaf in results if leaf.requires_grad]
            if not results:
                raise _NoGradient
            gradients = [torch.ones_like(leaf) for leaf in results]
            started_s = now()
            torch.autograd.backward(results, gradients)
            backwards.append(now() - started_s)
            forwards.append(forward_s)
        del output, results, own, own_words
    seconds = [forward + backward for forward, backward in zip(forwards[1:], backwards[1:])]
    return Block(
        name=name,
        forward_s=median(forwards[1:]) / samples,
        backward_s=median(backwards[1:]) / samples,
        parameter_bytes=bytes_of_parameters(block),
        activation_bytes=-(-activation_bytes // samples),
        output_bytes=-(-output_bytes // samples),
        spread=half_spread(seconds) / median(seconds),
    )


def _with_rest(
    model: nn.Module, blocks: NamedBlocks, found: list[Block], whole: list[_Trace], samples: int
) -> tuple[Block, ...]:
    """Put what comes before the first and after the last block around them."""
    trace = whole[-1]
    scale = 1 / samples
    before_s = scale * median(each.entered_s - each.start_s for each in whole)
    after_s = scale * median(each.forward_s - each.left_s for each in whole)
    backward_s = scale * median(each.end_s - each.forward_s for each in whole)
    rest_s = max(0.0, backward_s - sum(block.backward_s for block in found))
    part = before_s / (before_s + after_s) if before_s + after_s > 0 else 0.0
    called_before = {id(module) for module in model.modules()} - trace.after
    before_bytes, after_bytes = parameters_around(model, blocks, called_before)
    total_s = sum(block.forward_s + block.backward_s for block in found)
    inputs = [leaf for leaf in leaves(trace.calls[blocks[0][0]][0][0]) if isinstance(leaf, torch.Tensor)]
    before = Block(
        name=BEFORE_BLOCKS,
        forward_s=before_s,
        backward_s=rest_s * part,
        parameter_bytes=before_bytes,
        activation_bytes=max(0, trace.entered_bytes - trace.start_bytes) // samples,
        output_bytes=sum(leaf.numel() * leaf.element_size() for leaf in inputs) // samples,
    )
    after = Block(
        name=AFTER_BLOCKS,
        forward_s=after_s,
        backward_s=rest_s * (1 - part),
        parameter_bytes=after_bytes,
        activation_bytes=max(0, trace.forward_bytes - trace.left_bytes) // samples,
        output_bytes=0,
    )
    wanted = [
        rest.parameter_bytes > 0 or rest.forward_s + rest.backward_s > _LEAST_PART * total_s for rest in (before, after)
    ]
    return (*((before,) if wanted[0] else ()), *found, *((after,) if wanted[1] else ()))


def _scaled(blocks: tuple[Block, ...], sample_s: float) -> tuple[Block, ...]:
    factor = sample_s / sum(block.forward_s + block.backward_s for block in blocks)
    return tuple(
        msgspec.structs.replace(block, forward_s=factor * block.forward_s, backward_s=factor * block.backward_s)
        for block in blocks
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _differentiable(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.detach().requires_grad_(True)
    return leaf
