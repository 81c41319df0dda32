"""A rank's part in a run whose model state is cut into slices: what a step and a checkpoint ask of it.

The one idea: everything else in the runtime sees a sum of gradients to install and an optimizer to step, as with whole
replicas; where slices lie, and when blocks are whole, is known in this room only.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ragtag.checkpoint.parts import Described
from ragtag.comm.group import Group
from ragtag.core.chunks import chunk_sizes
from ragtag.core.config import Config
from ragtag.core.errors import ModelError
from ragtag.core.values import Layout
from ragtag.runtime.blocks import Listing, find_blocks
from ragtag.runtime.names import named_parameters
from ragtag.runtime.step_sums import StepSums
from ragtag.runtime.zero.block import Block
from ragtag.runtime.zero.buckets import SlicedBuckets
from ragtag.runtime.zero.choosing import needs_of
from ragtag.runtime.zero.flats import Flat, Piece, flats_of
from ragtag.runtime.zero.loading import Loading
from ragtag.runtime.zero.optimizer_state import PieceOptimizer, PieceState
from ragtag.runtime.zero.rounds import Rounds
from ragtag.runtime.zero.sums import SlicedSums
from ragtag.runtime.zero.whole import Whole, gathered, kept_of, single, state_slices, whole_of

Numbered = Sequence[tuple[int, str, torch.nn.Parameter]]
"""Parameters with their numbers and names."""


class Sharding:
    """Slices of one rank.

    Args:
        layout: "zero1", "zero2" or "zero3"; "pipeline" is a `Staging`.
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
        self.layout: Layout = layout
        self.weights = tuple(weights)
        self.needs = needs_of(model, optimizer, config.blocks)
        self._model, self._group = model, group
        named = list(named_parameters(model))
        self.names = [name for name, _ in named]
        self.number_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        """Of each parameter, by id."""
        self.optimizer = PieceOptimizer(optimizer, self.number_of)
        self.gathers = layout in ("zero3", "pipeline")
        """Whether parameters are whole on no rank between steps."""
        self.rank, self.num_cuts, self.intact = group.rank, 0, True
        """Whose slices these are in the present cut, how many there were before it, and whether it is complete."""
        with torch.no_grad():
            self.blocks = self._make_blocks(device, config)
        self.optimizer.take(self.pieces)
        self.rounds: Rounds | None = None
        self.sums: StepSums = self._make_sums(config)
        self._frozen = [member for flat in self.flats if not flat.trained for member in flat.members]
        self._reading = False
        self._hook = model.register_state_dict_pre_hook(self._refuse_state_dict) if self.gathers else None

    def _make_blocks(self, device: torch.device, config: Config) -> list[Block]:
        """Cut the model's parameters."""

        def make(parameters: Numbered) -> Flat:
            return Flat(parameters, weights=self.weights, rank=self._group.rank, device=device, whole=not self.gathers)

        if self.layout == "zero1":
            flats = flats_of(list(reversed(self._numbered())), make, limit_bytes=config.bucket_bytes)
            return [Block("the model", None, flats)]
        parts = _parts(self._model, self._numbered(), config.blocks)
        return [Block(name, module, flats_of(members, make)) for name, module, members in parts]

    def _make_sums(self, config: Config) -> StepSums:
        """What adds up gradients of what was cut."""
        if self.layout == "zero1":
            return SlicedBuckets(self.flats, self._group, wire=config.wire, overlap=config.overlap)
        self.rounds = Rounds(self._group, self._model, self.blocks, gathers=self.gathers, wire=config.wire)
        return SlicedSums(self.names, self.blocks, self.rounds)

    def _numbered(self) -> Numbered:
        return [(index, name, parameter) for index, (name, parameter) in enumerate(named_parameters(self._model))]

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

    def whole(self) -> Whole:
        """Return all of what is cut, which comes part by part. A call of the group, as is going through its parts."""
        return whole_of(self.optimizer, self.flats, self._group)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return every parameter whole, in host memory, on rank 0; elsewhere nothing. A call of the group."""
        found: dict[str, torch.Tensor] = {}
        for flat in self.flats:
            content = flat.full.cpu() if flat.whole else gathered(flat, flat.own, self._group)
            if self._group.rank == 0:
                for member in flat.members:
                    found[member.name] = _part(content, member)
        return found

    def loading(self, parameters: Mapping[int, Described], optimizer: Mapping[str, Any]) -> Loading:
        """Return what takes whole parameters, by number, and the `state_dict` of an optimizer over them, as they come.

        Raises:
            ModelError: the optimizer keeps something that cannot be cut.
        """

        def done() -> None:
            self.intact = True

        loading = Loading(self.flats, self.optimizer, parameters, optimizer, done=done)
        self.intact = False  # whoever is interrupted has some of the one state and some of the other
        return loading

    @torch.no_grad()
    def cut_anew(self, group: Group, owners: Sequence[int], weights: Sequence[int]) -> None:
        """Move slices among the ranks of `group`, so that they are of other sizes; a call of it.

        Args:
            owners: by rank of `group`, its rank in the present cut; -1: it has nothing of it.
            weights: relative sizes of the new slices.
        """
        self.intact = False
        if self.rounds is not None:
            self.rounds.abandon()
        has_any = owners[group.rank] >= 0
        before, known = self.weights, self.flats if has_any else []
        kept = kept_of(self.optimizer, known, group)
        self.weights = tuple(weights)
        states: dict[int, PieceState] = {}
        for flat in self.flats:
            sizes = chunk_sizes(flat.numel, before)
            there = [sizes[owner] if owner >= 0 else 0 for owner in owners]

            def whole(own: torch.Tensor, flat: Flat = flat, there: Sequence[int] = there) -> torch.Tensor:
                """All of what `own` is this rank's slice of, in the order of the present cut."""
                content = gathered(flat, own if has_any else own[:0], group, there)
                slices = dict(zip(owners, content.split(there)))
                return torch.cat([slices[owner] for owner in sorted(slices)])

            contents = {name: whole(own) for name, own in state_slices(flat, self.optimizer, kept)}
            flat.move_to(group.rank, weights, whole(flat.own))
            for piece in flat.pieces:
                number, offset = piece.member.number, piece.member.start + piece.first
                state: PieceState = {}
                for name, each in kept.get(number, {}).items():
                    if each.elementwise:
                        length = piece.last - piece.first
                        state[name] = contents[name][offset : offset + length].to(flat.own.device, copy=True)
                    else:
                        state[name] = single(each)
                states[number] = state
        self._now_cut(group, states)

    @torch.no_grad()
    def cut_empty(self, group: Group, weights: Sequence[int]) -> None:
        """Cut anew where some of the state is lost: all of it is to be loaded next. A call of no group."""
        self.intact, self.weights = False, tuple(weights)
        if self.rounds is not None:
            self.rounds.abandon()
        for flat in self.flats:
            flat.move_to(group.rank, weights, torch.zeros(flat.numel, dtype=flat.dtype))
        self._now_cut(group, {})

    def _now_cut(self, group: Group, states: Mapping[int, PieceState]) -> None:
        self.optimizer.take(self.pieces, states)
        self._group, self.rank, self.intact = group, group.rank, True
        self.num_cuts += 1
        if self.rounds is not None:
            self.rounds.use_group(group)
        self.sums.renew()

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
                f"model.state_dict() is empty of parameters: with layout '{self.layout}' they lie on all ranks, some "
                "on each. Use "
                "trainer.save(path) on every rank; `ragtag export` makes weights of such a file."
            )


def _part(content: torch.Tensor, member: Any) -> torch.Tensor:
    return content[member.start : member.stop].view(member.parameter.shape).clone()


def _parts(
    model: torch.nn.Module, numbered: Numbered, listed: Listing | None
) -> list[tuple[str, torch.nn.Module | None, list[tuple[int, str, torch.nn.Parameter]]]]:
    """What is gathered at a time: first what belongs to no single block, then block by block.

    What several blocks share belongs to none of them.
    """
    blocks, _ = find_blocks(model, listed)
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
    for each in numbered:
        only = users[id(each[2])]
        parts[1 + next(iter(only)) if len(only) == 1 and -1 not in only else 0][2].append(each)
    return [parts[0], *(part for part in parts[1:] if part[2])]
