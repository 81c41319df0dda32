"""A round: one micro-batch's forward and backward on every rank at once, for which blocks are gathered and released.

The one idea: hooks on the model and a rank without samples drive the same list of events (`schedule.py`), so whatever a
rank computes, all ranks gather and reduce in one order. The next block is on its way while one is computed, and
gradients leave while backward goes on.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ragtag.comm.group import Group, Work
from ragtag.comm.ring import Wire
from ragtag.core.errors import ModelError
from ragtag.core.quantities import format_bytes
from ragtag.runtime.out_of_memory import memory_explained
from ragtag.runtime.zero.block import Block
from ragtag.runtime.zero.schedule import Event, Noted, Schedule, gathers, next_use

_ON_THEIR_WAY = 2
"""Blocks whose gradients travel at a time: each takes as much memory as the block."""


class Rounds:
    """All rounds of one rank.

    Args:
        group: the ranks.
        model: whose parameters all of them are.
        blocks: what is gathered and reduced at a time; the first one, the root, is there for a whole round.
        gathers: parameters are released in between; else only gradients are reduced.
        wire: "fp32" or "bf16" gradients on the wire.
    """

    def __init__(
        self, group: Group, model: torch.nn.Module, blocks: Sequence[Block], *, gathers: bool, wire: Wire = "fp32"
    ) -> None:
        self._group, self._blocks, self._gathers = group, blocks, gathers
        self._wire: Wire | None = None if wire == "fp32" else wire
        self._schedule = Schedule()
        self.block_of = {index: number for number, block in enumerate(blocks) for index in block.trained}
        """By parameter."""
        self._place = 0
        self._in_round = self._in_backward = False
        self._backward_of: int | None = None
        """The block whose backward began last."""
        self._arrived: list[set[int]] = [set() for _ in blocks]
        self._reduced: set[int] = set()
        self._coming: dict[int, list[Work]] = {}
        self._leaving: deque[Work] = deque()
        self.bits = 0
        """One bit for each parameter that has had a gradient since `begin_step`."""
        self.num_begun = 0
        """Rounds since then."""
        self.too_early = False
        """A gradient came after its block's had left."""
        self.late = False
        """Blocks are reduced at the end of a round only, since gradients come when nobody expects them."""
        self.noted: list[Noted] | None = None
        """Where set, what happens is written down, and blocks are asked for by `lead`."""
        self.told: list[Any] = []
        """The round that all go by, as it was written down before step 1."""
        self.lead: Callable[[int], None] = lambda block: None
        self.came: Callable[[], None] = lambda: None
        """Called when more memory is in use than before."""
        self._travelling: deque[torch.Tensor] = deque()
        self._hooks: list[Any] = [hook for number in range(1, len(blocks)) for hook in self._hooks_of(number)]
        if gathers:
            self._hooks.append(model.register_forward_pre_hook(lambda *_: self._before_model()))
            self._hooks.append(model.register_forward_hook(lambda *_: self._after_model(), always_call=True))
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._on_gradient(index, p))
            for block in blocks
            for index, parameter in block.trained.items()
        ]

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def follow(self, schedule: Schedule) -> None:
        """From now on rounds are these."""
        self._schedule, self.noted = schedule, None

    def use_group(self, group: Group) -> None:
        """Go on with other ranks, or with the same ones in a new generation."""
        self._group = group

    def is_present(self, number: int) -> bool:
        """Whether a block is gathered."""
        return self._blocks[number].is_present and number not in self._coming

    def have(self, number: int) -> None:
        """Gather a block; all ranks do."""
        self._present(number)

    def gathers(self) -> Counter[int]:
        """Return how often a round gathers each block."""
        return gathers(self._schedule.events) if self._gathers else Counter()

    # ---- a step

    def begin_step(self) -> None:
        """Forget the last step's sums."""
        self.abandon()
        self.bits, self.num_begun, self.too_early = 0, 0, False
        for block in self._blocks:
            block.begin_sums()

    def abandon(self) -> None:
        """Forget what is under way: an error ends the step, or all ranks do it again."""
        self._in_round = self._in_backward = False
        self._backward_of = None
        for number in self._coming:
            for flat in self._blocks[number].flats:
                flat.renew()
        self._coming.clear()
        self._leaving.clear()
        self._drop_gradients()
        for block in self._blocks:
            block.release()

    def wait(self) -> None:
        """Wait until everything that was launched is there (bounded by the group)."""
        while self._leaving:
            self._group.wait(self._leaving.popleft(), "reducing gradients")
        self._travelling.clear()

    def passing(self) -> Iterator[torch.Tensor]:
        """What comes and goes: whole blocks, slices of gradients, gradients, and copies of them on their way."""
        for block in self._blocks:
            for flat in block.flats:
                yield flat.own
                if flat.is_present:
                    yield flat.full
            for summed in block.summed:
                if summed.sum is not None:
                    yield summed.sum
            for parameter in block.trained.values():
                if parameter.grad is not None:
                    yield parameter.grad
        yield from self._travelling

    # ---- a round

    def begin(self) -> None:
        """Before a micro-batch's forward."""
        assert not self._in_round, "the last round has ended"
        self._place, self._in_round, self._in_backward = 0, True, False
        self.num_begun += 1
        self._reduced.clear()
        for arrived in self._arrived:
            arrived.clear()
        if self._gathers:
            self._present(0)
            self._fetch_ahead()
            self.came()

    def begin_backward(self) -> None:
        """Before its backward."""
        self._in_backward = True

    def end(self) -> None:
        """After its backward, or where this rank goes no further: the rest of the round, as for a rank without
        samples."""
        self._in_backward = False
        self._backward_of = None
        self._execute_up_to(len(self._schedule.events))
        for number in range(len(self._blocks) - 1, -1, -1):
            if number not in self._reduced and self._blocks[number].trained:
                self._reduce(number)
        for block in self._blocks:
            block.release()
        self._in_round = False

    def idle(self) -> None:
        """A round of a rank without samples."""
        self.begin()
        self.end()

    def give_up(self) -> None:
        """Go no further in a round that has failed here, for want of memory for instance; the others' go on."""
        self._drop_gradients()
        if self._in_round:
            self.end()

    def forward_only(self, forward: Callable[[], Any] | None) -> Any:
        """A round without backward: what `forward` returns, or None where this rank has nothing to compute."""
        self.begin()
        try:
            result = forward() if forward is not None else None
        except BaseException:
            self.abandon()
            raise
        self._execute_up_to(self._schedule.num_forward)
        for number in list(self._coming):  # what backward would have used
            self._present(number)
        for block in self._blocks:
            block.release()
        self._in_round = False
        return result

    # ---- what hooks and idle ranks drive

    def _execute_up_to(self, place: int) -> None:
        while self._place < place:
            self._execute(self._schedule.events[self._place])

    def _execute(self, event: Event) -> None:
        self._place += 1
        kind, number = event
        if kind == "use":
            self._present(number)
            self._fetch_ahead()
        elif kind == "reduce":
            if not self.late:
                self._reduce(number)
            self._blocks[number].release()
        elif next_use(self._schedule.events, self._place) != number:
            self._blocks[number].release()

    def _happened(self, kind: str, number: int) -> None:
        """The model has reached an event. What comes before it in the list, this micro-batch leaves out."""
        events = self._schedule.events
        try:
            place = events.index((kind, number), self._place)
        except ValueError:
            raise ModelError(
                f"rank {self._group.rank} came to the block '{self._blocks[number].name}' where it was not used in the "
                f"trial before step 1. Where parameters are gathered, a micro-batch may leave blocks out, but not use "
                f"others, or in another order. Take Config(layout='zero2'), which leaves parameters whole."
            ) from None
        self._execute_up_to(place + 1)
        if kind == "use":
            self.came()  # not before: where this rank gives up, everything was launched as on the others

    def _present(self, number: int) -> None:
        """Have a block gathered."""
        if number not in self._coming and not self._blocks[number].is_present:
            self._fetch(number)
        for work in self._coming.get(number, ()):
            self._group.wait(work, f"gathering '{self._blocks[number].name}'")
        self._coming.pop(number, None)  # not before: where a wait is broken off, somebody may still write into it

    def _fetch(self, number: int) -> None:
        works = []
        for flat in self._blocks[number].flats:
            with self._room(flat.num_bytes, f"to gather '{self._blocks[number].name}'"):
                flat.fill()
            works.append(self._group.all_gather(flat.full, flat.sizes))
        self._coming[number] = works

    def _fetch_ahead(self) -> None:
        number = next_use(self._schedule.events, self._place)
        if number is not None and number not in self._coming and not self._blocks[number].is_present:
            self._fetch(number)

    def _reduce(self, number: int) -> None:
        self._reduced.add(number)
        for flat, add in self._blocks[number].outgoing():
            if len(self._leaving) >= _ON_THEIR_WAY:
                self._group.wait(self._leaving.popleft(), "reducing gradients")
            if len(self._travelling) >= _ON_THEIR_WAY:
                self._travelling.popleft()  # before the next one takes memory
            with self._room(flat.flat.num_bytes, f"for gradients of '{self._blocks[number].name}' on their way"):
                content = flat.gradient()
            self._travelling.append(content)
            wire = self._wire if content.dtype == torch.float32 else None
            self._leaving.append(self._group.reduce_scatter(content, flat.sizes, wire=wire, done=add(content)))

    def _room(self, num_bytes: int, purpose: str) -> AbstractContextManager[None]:
        """What runs out of memory in here ends the run: the others would wait for what this rank cannot launch."""
        what = f"{format_bytes(num_bytes)} {purpose}"
        return memory_explained(self._group, None, what, "Give this device a smaller slice: Config(slices=...).")

    def _drop_gradients(self) -> None:
        for block in self._blocks:
            for parameter in block.trained.values():
                parameter.grad = None

    # ---- hooks

    def _hooks_of(self, number: int) -> Iterator[Any]:
        module = self._blocks[number].module
        assert module is not None, "only the root belongs to no module"
        yield module.register_forward_pre_hook(lambda *_: self._before_forward(number))
        yield module.register_forward_hook(lambda _module, _inputs, output: self._after_forward(number, output))

    def _before_model(self) -> None:
        """The script calls the model itself, between steps; then every rank does."""
        self._backward_of = None
        if not self._in_round and self.noted is None:
            self._present(0)

    def _after_model(self) -> None:
        if not self._in_round and self.noted is None:
            self._blocks[0].release()

    def _before_forward(self, number: int) -> None:
        if self.noted is not None:
            self.noted.append(Noted("forward", number))
            self.lead(number)
        elif self._in_round:
            if self._gathers:
                self._happened("use", number)
        elif self._gathers:
            self._present(number)

    def _after_forward(self, number: int, output: Any) -> None:
        if torch.is_grad_enabled() and (self._in_round or self.noted is not None):
            hook = self._before_backward(number)
            for value in pytree.tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(hook)
        if number == self._backward_of:
            return  # computed again: its backward comes now
        if self.noted is not None:
            self.noted.append(Noted("done", number))
            self._blocks[number].release()
        elif self._in_round:
            if self._gathers:
                self._happened("done", number)
        elif self._gathers:
            self._blocks[number].release()

    def _before_backward(self, number: int) -> Callable[[torch.Tensor], None]:
        """The first gradient of its output has come: backward of this call of the block begins."""
        begun = False

        def hook(gradient: torch.Tensor) -> None:
            nonlocal begun
            if begun:
                return
            begun = True
            self._backward_of = number if self.noted is not None or self._in_backward else None
            if self.noted is not None:
                self.noted.append(Noted("backward", number))
                self.lead(number)
            elif self._in_backward and self._gathers:
                self._happened("use", number)

        return hook

    def _on_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        number = self.block_of[index]
        arrived = self._arrived[number]
        if self.noted is not None:
            self.noted.append(Noted("gradient", index))
            parameter.grad = None
            arrived.add(index)
            if len(arrived) == len(self._blocks[number].trained):
                arrived.clear()
                self._blocks[number].release()
            return
        if not self._in_backward:
            return
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ModelError("a gradient is sparse; ragtag reduces dense ones. Use nn.Embedding(..., sparse=False).")
        self.bits |= 1 << index
        self.too_early = self.too_early or number in self._reduced
        arrived.add(index)
        if number and not self.late and arrived == self._schedule.arriving.get(number):
            self._ready(number)

    def _ready(self, number: int) -> None:
        """All gradients of a block are there: they leave, if it is their turn."""
        place, events = self._place, self._schedule.events
        while place < len(events) and events[place].kind == "done":
            place += 1
        if events[place : place + 1] == (Event("reduce", number),):
            self._execute_up_to(place + 1)
