"""Runs the part of a model that belongs to one stage, without a line of the model's own code changed.

The one idea: every stage runs the whole of `loss_fn(model, batch)`, but only its own blocks do anything. Blocks before
them hand on what they are given, the last of these what came from the stage before; the block after the last own one
ends the forward. So whatever the model's forward makes of the batch besides, such as masks and positions,
each stage makes itself, and the last stage computes the very loss that the script wrote. Where that needs parameters
which another stage uses too, both have them, and each has its own part of their gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ragtag.runtime.blocks import NamedBlocks


class _Cut(BaseException):
    """Ends a forward where the next stage begins. Not an Exception: the script's code must not catch it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Ran(NamedTuple):
    """What a stage's forward gave."""

    handed_on: torch.Tensor | None
    """To the next stage; None: this is the last one."""
    result: Any
    """What the call returned; None: it did not come to its end."""


class StagedModel:
    """The blocks `first` .. `stop` - 1 of a model.

    Args:
        blocks: all of the model's.
        returns_tuple: by block, 0 where it returns a tensor, else the length of the tuple that it returns.
    """

    def __init__(self, blocks: NamedBlocks, returns_tuple: Sequence[int], first: int, stop: int) -> None:
        self._modules = [block for _, block in blocks]
        self._returns_tuple, self.first, self.stop = returns_tuple, first, stop

    @property
    def is_first(self) -> bool:
        """Whether nothing comes from another stage."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing is handed on."""
        return self.stop == len(self._modules)

    def run(self, call: Callable[[], Any], received: torch.Tensor | None) -> Ran:
        """Run this stage's part of `call`, which calls the model once.

        Args:
            received: what the stage before has handed on; None for the first stage.
        """
        assert (received is None) == self.is_first, "the first stage, and no other, receives nothing"
        before = [module.__dict__.get("forward") for module in self._modules]
        for index, module in enumerate(self._modules):
            if index < self.first:
                module.forward = self._skipped(index, received if index == self.first - 1 else None)
            elif index == self.stop:
                module.forward = _cut
        try:
            return Ran(None, call())
        except _Cut as cut:
            return Ran(cut.value, None)
        finally:
            for module, forward in zip(self._modules, before):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = forward

    def _skipped(self, index: int, received: torch.Tensor | None) -> Callable[..., Any]:
        length = self._returns_tuple[index]

        def hand_on(value: Any, *_: Any, **__: Any) -> Any:
            value = value if received is None else received
            return (value, *[None] * (length - 1)) if length else value

        return hand_on


def _cut(value: Any, *_: Any, **__: Any) -> Any:
    raise _Cut(value)
