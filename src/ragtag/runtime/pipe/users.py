"""Which blocks' stages need which parameters, seen in one forward of the whole model.

The one idea: a parameter belongs to the block that it lies in, or to what runs before the first block, or after the
last one. What several of these use, such as tied weights, is held by each of their stages, and its gradients are added
up over them like those of replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ragtag.core.errors import ModelError
from ragtag.runtime.blocks import NamedBlocks

BEFORE = -1
"""What runs before the first block; what runs after the last of n blocks is n."""


class Traced:
    """What one forward showed."""

    def __init__(self, users: Sequence[frozenset[int]], returns_tuple: Sequence[int]) -> None:
        self.users = tuple(users)
        """By parameter, in the order of the model's, the blocks that use it, `BEFORE` and n among them."""
        self.returns_tuple = tuple(returns_tuple)
        """By block: 0 where it returns a tensor, else the length of the tuple that it returns."""


def trace(model: nn.Module, blocks: NamedBlocks, parameters: Sequence[nn.Parameter], run: Callable[[], Any]) -> Traced:
    """Return what `run`, one forward of the whole model, shows.

    Raises:
        ModelError: the model cannot be cut between these blocks; says why.
    """
    watch = _Watch(model, blocks)
    with watch:
        run()
    watch.check()
    return Traced([watch.users_of(parameter) for parameter in parameters], watch.returns_tuple)


class _Watch:
    """Hooks on all modules during one forward."""

    def __init__(self, model: nn.Module, blocks: NamedBlocks) -> None:
        self._model, self._blocks, self._count = model, blocks, len(blocks)
        self._number = {id(block): index for index, (_, block) in enumerate(blocks)}
        self._inside = {id(module): index for index, (_, block) in enumerate(blocks) for module in block.modules()}
        self._name = {id(module): name for name, module in model.named_modules()}
        self._at: dict[int, set[int]] = {}
        """By module outside of blocks, where it was called."""
        self._open: list[int] = []
        """Modules whose forward is under way."""
        self.order: list[int] = []
        self._ended = 0
        self._given: Any = None
        """What the last block to end has returned, or the first of it."""
        self._model_calls = 0
        self.returns_tuple = [0] * self._count
        self._refusal = ""
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._begins, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._ends, always_call=True))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, module: nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
        if module is self._model:
            self._model_calls += 1
        if not self._open and module is not self._model and not self._refusal:
            self._refusal = f"loss_fn calls '{self._name[id(module)]}' itself, not only the model"
        self._open.append(id(module))
        if (index := self._number.get(id(module))) is not None:
            self.order.append(index)
            name = self._blocks[index][0]
            if not (inputs and isinstance(inputs[0], torch.Tensor)):
                self._refusal = self._refusal or f"the first argument of block '{name}' is not a tensor"
            elif self._ended and inputs[0] is not self._given:
                self._refusal = self._refusal or f"block '{name}' is not given what the block before it returns"
        elif id(module) not in self._inside:
            where = BEFORE if not self.order else self._count if self._ended >= self._count else None
            if where is None:
                own = next((name for name, _ in module.named_parameters(recurse=False)), None)
                if own is not None and not self._refusal:
                    before = self._blocks[self.order[-1]][0]
                    self._refusal = (
                        f"'{self._name[id(module)]}' has parameters and runs after block '{before}', but is in no "
                        f"block: the list of blocks does not cover the model"
                    )
                return
            self._at.setdefault(id(module), set()).add(where)

    def _ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open and self._open[-1] == id(module):
            self._open.pop()
        if (index := self._number.get(id(module))) is not None:
            self._ended += 1
            self._given = output[0] if isinstance(output, tuple) and output else output
            if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
                self.returns_tuple[index] = len(output)
            elif not isinstance(output, torch.Tensor) and not self._refusal:
                kind = type(output).__name__
                self._refusal = f"block '{self._blocks[index][0]}' returns a {kind}, not a tensor or a tuple of one"
        elif id(module) not in self._inside and self._ended and id(module) in self._at:
            self._at[id(module)].add(self._count)  # it has begun before the blocks and ends after some: who knows

    def check(self) -> None:
        """Raise ModelError where the model cannot be cut."""
        if self._model_calls > 1 or (self._model_calls == 0 and not self._refusal):
            self._refusal = f"loss_fn calls the model {self._model_calls} times, not once"
        if self.order != list(range(self._count)) and not self._refusal:
            ran = [self.order.count(index) for index in range(self._count)]
            odd = next((index for index, times in enumerate(ran) if times != 1), None)
            self._refusal = (
                f"block '{self._blocks[odd][0]}' runs {ran[odd]} times in a forward, not once"
                if odd is not None
                else "blocks do not run in their order"
            )
        if self._refusal:
            raise refused(self._refusal)

    def users_of(self, parameter: nn.Parameter) -> frozenset[int]:
        """The blocks that need a parameter."""
        found: set[int] = set()
        for module in self._model.modules():
            if any(own is parameter for own in module.parameters(recurse=False)):
                inside = self._inside.get(id(module))
                found |= {inside} if inside is not None else self._at.get(id(module), set())
        return frozenset(found or {BEFORE})


def refused(reason: str) -> ModelError:
    """The error that says why a model cannot be cut into stages."""
    return ModelError(
        f"layout 'pipeline': {reason}. A pipeline needs blocks that run one after the other, each taking the output "
        f"of the one before as its first argument: name them with Config(blocks=...), or take Config(layout='zero3')."
    )
