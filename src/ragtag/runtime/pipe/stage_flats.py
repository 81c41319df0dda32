"""Parameters that are whole on those ranks whose stages need them, and nowhere else.

The one idea: what a stage holds is a slice like any other, all of a flat tensor or nothing of it, so checkpoints,
optimizer state and loading need not know about pipelines. Where several ranks hold it, the first one speaks for all.
"""

from collections.abc import Iterable, Sequence

import torch

from ragtag.runtime.zero.flats import Flat


class StageFlat(Flat):
    """Parameters of one dtype, device and use, end to end.

    Args:
        parameters: (index, name, parameter), all of one dtype.
        owners: the ranks that hold it, the first of which speaks for all.
        rank: this one.
        world_size: number of ranks.
        device: where it lies from now on.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[int, str, torch.nn.Parameter]],
        *,
        owners: Sequence[int],
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.owners = tuple(owners)
        self._held = rank in self.owners
        speaks = [int(each == self.owners[0]) for each in range(world_size)]
        here = device if self._held else torch.device("cpu")  # a device has room for its own stage only
        super().__init__(parameters, weights=speaks, rank=rank, device=here, whole=False)
        if not self._held:
            self._move_absent(device)

    @property
    def held(self) -> bool:
        """Whether this rank holds it."""
        return self._held

    @property
    def speaks(self) -> bool:
        """Whether this rank's copy is the one that counts where one is asked for."""
        return self._rank == self.owners[0]

    def _cut(self, weights: Sequence[int]) -> None:
        super()._cut(weights)
        self.start, self.stop = 0, self.numel if self._held else 0

    def _kept(self, own: torch.Tensor) -> torch.Tensor:
        return own if self._held else own.clone()

    def fill(self) -> None:
        """Do nothing: what this rank has is there, and the rest is not asked for."""

    def release(self) -> None:
        """Keep what this rank has, and nothing else."""
        if not self._held:
            super().release()

    def _move_absent(self, device: torch.device) -> None:
        self._absent = [absent.to(device) for absent in self._absent]
        self._point(present=False)
        self.full = torch.empty(0, dtype=self.dtype, device=device)
        self.own = self.full
