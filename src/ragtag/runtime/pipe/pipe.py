"""A rank's place in a pipeline: which part of the model it runs, whose samples pass it, and who its neighbours are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragtag.comm.group import Group
from ragtag.core.errors import SettingError
from ragtag.core.stages import feeding_ranks, shares_of, text_from_stages
from ragtag.core.values import Stages
from ragtag.runtime.pipe.choosing import Found
from ragtag.runtime.pipe.order import Turn, turns
from ragtag.runtime.pipe.staged import Ran, StagedModel
from ragtag.runtime.pipe.traffic import Traffic


class Pipe:
    """Of one rank.

    Args:
        found: blocks, and where they are cut.
        group: the ranks of the run.
    """

    def __init__(self, found: Found, group: Group) -> None:
        self.stages: Stages = found.cut.stages
        self.micro_batch, self.reason = found.cut.micro_batch, found.cut.reason
        self._samples = found.cut.samples
        self.feeding_ranks = feeding_ranks(self.stages, group.world_size)
        """By rank, whose samples pass it: those of its pipeline's last stage."""
        self.feeding_rank = self.feeding_ranks[group.rank]
        self.parts = [0.0] * group.world_size
        """By rank, of the time that the whole model's forward and backward takes; 0: it has no stage."""
        for stage in (each for pipeline in self.stages for each in pipeline):
            held = slice(stage.first, stage.stop)
            self.parts[stage.rank] = sum(found.forward[held]) + sum(found.backward[held])
        self._group = group
        self._pipeline = next((p for p in self.stages if any(stage.rank == group.rank for stage in p)), ())
        self._place = next((place for place, stage in enumerate(self._pipeline) if stage.rank == group.rank), 0)
        self._staged: StagedModel | None = None
        self.forward_part = self.backward_part = 0.0
        """Of the time that the whole model's forward and backward takes."""
        if self._pipeline:
            stage = self._pipeline[self._place]
            self._staged = StagedModel(found.blocks, found.traced.returns_tuple, stage.first, stage.stop)
            self.forward_part = sum(found.forward[stage.first : stage.stop])
            self.backward_part = sum(found.backward[stage.first : stage.stop])

    def shares(self, pinned: Sequence[int] | None) -> tuple[int, ...]:
        """Return the samples of a global batch by rank: a pipeline's are its last stage's.

        Raises:
            SettingError: `pinned` gives some to other ranks.
        """
        world_size = self._group.world_size
        if pinned is None:
            return shares_of(self.stages, world_size, self._samples)
        last = {pipeline[-1].rank for pipeline in self.stages}
        if odd := [rank for rank, share in enumerate(pinned) if share and rank not in last]:
            raise SettingError(
                f"shares = {tuple(pinned)}: rank {odd[0]} is not the last stage of a pipeline "
                f"({text_from_stages(self.stages)}). Samples belong to last stages: ranks {sorted(last)}."
            )
        return tuple(pinned)

    @property
    def takes_part(self) -> bool:
        """Whether this rank has a stage."""
        return self._staged is not None

    @property
    def is_first(self) -> bool:
        """Whether nothing comes from another stage."""
        return self._place == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._staged is not None and self._staged.is_last

    def traffic(self, order: Sequence[Turn], *, backward: bool, doing: str = "passing activations") -> Traffic:
        """Begin to carry what `order` needs; all ranks do at the same time."""
        at = self._place
        before = self._pipeline[at - 1].rank if self._pipeline and at > 0 else None
        after = self._pipeline[at + 1].rank if at + 1 < len(self._pipeline) else None
        return Traffic(self._group, before=before, after=after, turns=order, backward=backward, doing=doing)

    def order(self, num_micro_batches: int) -> list[Turn]:
        """This rank's turns in a step."""
        if not self._pipeline:
            return []
        return list(turns(num_micro_batches, self._place, len(self._pipeline)))

    def run(self, call: Callable[[], Any], received: torch.Tensor | None) -> Ran:
        """See `StagedModel.run`."""
        assert self._staged is not None
        return self._staged.run(call, received)
