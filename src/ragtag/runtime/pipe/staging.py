"""A rank's part in a run whose model is cut into stages: what a checkpoint and the optimizer ask of it.

The one idea: to everything outside of a step, a stage is a slice that happens to hold whole parameters.
"""

from collections.abc import Iterator

import torch

from ragtag.comm.group import Group
from ragtag.core.config import Config
from ragtag.runtime.pipe.choosing import Found
from ragtag.runtime.pipe.stage_flats import StageFlat
from ragtag.runtime.pipe.stage_sums import StageSums
from ragtag.runtime.pipe.users import BEFORE
from ragtag.runtime.zero.block import Block
from ragtag.runtime.zero.flats import Flat, flats_of
from ragtag.runtime.zero.sharding import Numbered, Sharding


class Staging(Sharding):
    """Stages of one rank.

    Args:
        found: where the model is cut, and which blocks use which parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        found: Found,
        device: torch.device,
        config: Config,
    ) -> None:
        self._stages, self._num_blocks, self._traced = found.cut.stages, len(found.blocks), found.traced
        super().__init__(model, optimizer, group, layout="pipeline", weights=(), device=device, config=config)

    @property
    def in_rounds(self) -> bool:
        """Every micro-batch is one of all stages."""
        return True

    def _make_blocks(self, device: torch.device, config: Config) -> list[Block]:
        numbered = self._numbered()
        parts: dict[frozenset[int], list[tuple[int, str, torch.nn.Parameter]]] = {}
        for each in numbered:
            parts.setdefault(self._traced.users[each[0]], []).append(each)
        blocks = []
        for users in sorted(parts, key=sorted):
            owners = self._owners(users)

            def make(parameters: Numbered, owners: tuple[int, ...] = owners) -> Flat:
                return StageFlat(
                    parameters,
                    owners=owners,
                    rank=self._group.rank,
                    world_size=self._group.world_size,
                    device=device,
                )

            blocks.append(Block(_name(users, self._num_blocks), None, flats_of(parts[users], make)))
        return blocks

    def _owners(self, users: frozenset[int]) -> tuple[int, ...]:
        """The ranks that need what these blocks use, the first pipeline's first."""
        found = []
        for pipeline in self._stages:
            for place, stage in enumerate(pipeline):
                ends = (BEFORE,) * (place == 0) + (self._num_blocks,) * (place == len(pipeline) - 1)
                if any(stage.first <= user < stage.stop or user in ends for user in users):
                    found.append(stage.rank)
        return tuple(found)

    def _make_sums(self, config: Config) -> StageSums:
        flats = [flat for flat in self.flats if isinstance(flat, StageFlat)]
        self._stage_sums = StageSums(self.names, flats, self._group, wire=config.wire)
        return self._stage_sums

    def passing(self) -> Iterator[torch.Tensor]:
        """What comes and goes in a step."""
        return self._stage_sums.passing()


def _name(users: frozenset[int], num_blocks: int) -> str:
    words = {BEFORE: "what runs before the blocks", num_blocks: "what runs after them"}
    return " and ".join(words.get(user, f"block {user}") for user in sorted(users))
