"""A rank's part in a run whose model state is cut into slices: what a step and a checkpoint ask of it.

The one idea: everything else in the runtime sees a sum of gradients to install and an optimizer to step, as with whole
replicas; where slices lie, and when blocks are whole, is known in this room only.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ragtag.comm.group import Group
from ragtag.core.config import Config
from ragtag.core.errors import ModelError
from ragtag.core.values import Layout
from ragtag.runtime.blocks import find_blocks
from ragtag.runtime.names import named_parameters, plain_name
from ragtag.runtime.step_sums import StepSums
from ragtag.runtime.zero import whole
from ragtag.runtime.zero.block import Block
from ragtag.runtime.zero.buckets import SlicedBuckets
from ragtag.runtime.zero.flats import Flat, Piece, flats_of
from ragtag.runtime.zero.optimizer_state import PieceOptimizer, PieceState
from ragtag.runtime.zero.rounds import Rounds
from ragtag.runtime.zero.sums import SlicedSums


class Sharding:
    """Slices of one rank.

    Args:
        layout: "zero1", "zero2" or "zero3".
        weights: relative size of each rank's slices.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        layout: Layout,
        weights: Sequence[int],
        device: torch.device,
        config: Config,
    ) -> None:
        self.layout, self.weights = layout, tuple(weights)
        self._model, self._group = model, group
        named = list(named_parameters(model))
        self.names = [name for name, _ in named]
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self.optimizer = PieceOptimizer(optimizer, index_of)
        self.gathers = layout == "zero3"

        def make(parameters: Sequence[tuple[int, str, torch.nn.Parameter]]) -> Flat:
            return Flat(parameters, weights=weights, rank=group.rank, device=device, whole=not self.gathers)

        parts = _parts(model) if layout != "zero1" else [("the model", None, list(reversed(_numbered(model))))]
        limit = config.bucket_bytes if layout == "zero1" else None
        with torch.no_grad():
            self.blocks = [
                Block(name, module, flats_of(members, make, limit_bytes=limit)) for name, module, members in parts
            ]
        self.optimizer.take(self.pieces)
        self.rounds: Rounds | None = None
        self.sums: StepSums
        if layout == "zero1":
            self.sums = SlicedBuckets(self.flats, group, wire=config.wire, overlap=config.overlap)
        else:
            self.rounds = Rounds(group, model, self.blocks, gathers=self.gathers, wire=config.wire)
            self.sums = SlicedSums(self.names, self.blocks, self.rounds)
        self._frozen = [member for flat in self.flats if not flat.trained for member in flat.members]
        self._reading = False
        self._hook = model.register_state_dict_pre_hook(self._refuse_state_dict) if self.gathers else None

    @property
    def flats(self) -> list[Flat]:
        """All of them, in order."""
        return [flat for block in self.blocks for flat in block.flats]

    @property
    def pieces(self) -> list[Piece]:
        """What this rank owns."""
        return [piece for flat in self.flats for piece in flat.pieces]

    def close(self) -> None:
        """Take the hooks off the model."""
        self.sums.close()
        if self._hook is not None:
            self._hook.remove()

    @property
    def in_rounds(self) -> bool:
        """Whether every micro-batch is one of all ranks, whose gradients nobody has alone."""
        return self.rounds is not None

    def check_trained(self) -> None:
        """Raise ModelError where the script has unfrozen parameters: they are not among those that are trained."""
        for member in self._frozen:
            if member.parameter.requires_grad:
                raise ModelError(
                    f"the parameter '{member.name}' was frozen when the run began, and is to be trained now. Where "
                    f"state is cut (layout '{self.layout}'), leave it trainable when the trainer is made and "
                    f"freeze it then; or take Config(layout='replicated')."
                )

    def updated(self) -> None:
        """The optimizer has stepped this rank's pieces: where parameters are whole everywhere, tell the others."""
        if not self.gathers:
            works = [self._group.all_gather(flat.full, flat.sizes) for flat in self.flats if flat.trained]
            for work in works:
                self._group.wait(work, "gathering updated parameters")

    # ---- whole tensors

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return every parameter whole, in host memory, on rank 0; elsewhere nothing. A call of the group."""
        found: dict[str, torch.Tensor] = {}
        for flat in self.flats:
            content = flat.full.cpu() if flat.whole else whole.gathered(flat, flat.own, self._group)
            if self._group.rank == 0:
                for member in flat.members:
                    found[member.name] = _part(content, member)
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """Return the `state_dict` of the optimizer as over whole parameters, on rank 0; elsewhere it lacks tensors. A
        call of the group."""
        kept = whole.kept_of(self.optimizer, self.flats, self._group)
        states: dict[int, PieceState] = {}
        for flat in self.flats:
            for name, own in whole.state_slices(flat, self.optimizer, kept):
                content = whole.gathered(flat, own, self._group)
                for member in flat.members:
                    if self._group.rank == 0 and name in kept.get(member.number, {}):
                        states.setdefault(member.number, {})[name] = _part(content, member)
        for index, named in kept.items():
            for name, each in named.items():
                if not each.elementwise:
                    states.setdefault(index, {})[name] = whole.single(each)
        described = self.optimizer.optimizer.state_dict()
        numbers: dict[int, int] = {}
        groups = []
        for saved, indices in zip(described["param_groups"], self.optimizer.groups):
            for index in indices:
                numbers.setdefault(index, len(numbers))
            groups.append({**saved, "params": [numbers[index] for index in indices]})
        ordered = {numbers[index]: states[index] for index in sorted(states, key=lambda each: numbers[each])}
        return {"state": ordered, "param_groups": groups}

    def load(self, parameters: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Take whole parameters by name, and the state of an optimizer over them."""
        with torch.no_grad():
            for flat in self.flats:
                for member in flat.members:
                    value = parameters[plain_name(member.name)].reshape(-1)
                    if flat.whole:
                        flat.full[member.start : member.stop].copy_(value)
                for piece in flat.pieces:
                    value = parameters[plain_name(piece.member.name)].reshape(-1)
                    piece.parameter.copy_(value[piece.first : piece.last])
        self.optimizer.load(optimizer)

    @torch.no_grad()
    def reshard(self, group: Group, sizes_of: Mapping[int, Sequence[int]], weights: Sequence[int]) -> None:
        """Cut anew among the ranks of `group`; a call of it.

        Args:
            sizes_of: by flat, who has how many elements of it now, by rank of `group`.
            weights: relative sizes of the new slices.
        """
        kept = whole.kept_of(self.optimizer, self.flats, group)
        self._group, self.weights = group, tuple(weights)
        states: dict[int, PieceState] = {}
        for number, flat in enumerate(self.flats):
            sizes = sizes_of[number]
            contents = {
                name: whole.gathered(flat, own, group, sizes)
                for name, own in whole.state_slices(flat, self.optimizer, kept)
            }
            content = whole.gathered(flat, flat.own, group, sizes)
            flat.move_to(group.rank, weights, content)
            for piece in flat.pieces:
                index = piece.member.number
                offset = piece.member.start + piece.first
                state: PieceState = {}
                for name, each in kept.get(index, {}).items():
                    if each.elementwise:
                        length = piece.last - piece.first
                        state[name] = contents[name][offset : offset + length].to(flat.own.device, copy=True)
                    else:
                        state[name] = whole.single(each)
                states[index] = state
        self.optimizer.take(self.pieces, states)
        if self.rounds is not None:
            self.rounds.use_group(group)

    # ---- the model's own state_dict

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In here the model's `state_dict` is asked for its names and shapes only."""
        before, self._reading = self._reading, True
        try:
            yield
        finally:
            self._reading = before

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self._reading:
            raise ModelError(
                "model.state_dict() is empty of parameters: with layout 'zero3' they lie in slices on all ranks. Use "
                "trainer.save(path) on every rank; `ragtag export` makes weights of such a file."
            )


def _part(content: torch.Tensor, member: Any) -> torch.Tensor:
    return content[member.start : member.stop].view(member.parameter.shape).clone()


def _parts(
    model: torch.nn.Module,
) -> list[tuple[str, torch.nn.Module | None, list[tuple[int, str, torch.nn.Parameter]]]]:
    """What is gathered at a time: first what belongs to no single block, then block by block.

    What several blocks share belongs to none of them.
    """
    blocks, _ = find_blocks(model)
    users: dict[int, set[int]] = {}
    inside: set[int] = set()
    for number, (_, module) in enumerate(blocks):
        inside |= {id(each) for each in module.modules()}
        for parameter in module.parameters():
            users.setdefault(id(parameter), set()).add(number)
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                users.setdefault(id(parameter), set()).add(-1)
    parts: list[Any] = [("the rest of the model", None, [])]
    parts += [(name, module, []) for name, module in blocks]
    for each in _numbered(model):
        only = users[id(each[2])]
        parts[1 + next(iter(only)) if len(only) == 1 and -1 not in only else 0][2].append(each)
    return [parts[0], *(part for part in parts[1:] if part[2])]


def _numbered(model: torch.nn.Module) -> list[tuple[int, str, torch.nn.Parameter]]:
    return [(index, name, parameter) for index, (name, parameter) in enumerate(named_parameters(model))]
