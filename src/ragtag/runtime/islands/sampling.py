"""Which samples an island's steps have, where its part of the batch changes as it trains.

The one idea: an island goes through epochs of its own, in an order of its own, and only how many samples a step takes
changes; so a change needs to remember one number, where the last step ended.
"""

from zlib import crc32

from ragtag.core.mixing import seed_for
from ragtag.core.sampler import Sampler
from ragtag.core.values import Batch

_KEY_ISLAND = 0x15_1A_4D


class IslandSampler(Sampler):
    """As `Sampler`, from step `after` + 1 on, beginning at `position` samples from the beginning of epoch 0.

    Args:
        whole_batch_size: samples of a step of all islands together.
    """

    def __init__(
        self,
        *,
        dataset_size: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        whole_batch_size: int,
        after: int = 0,
        position: int = 0,
    ) -> None:
        super().__init__(dataset_size=dataset_size, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle)
        self.whole_batch_size, self.after, self.position = whole_batch_size, after, position

    def batch(self, step: int) -> Batch:
        """Return which positions of which epoch step `step` has."""
        assert step > self.after, f"step {step} is from before the batch was changed, after step {self.after}"
        number = step - self.after - 1
        epoch, first = divmod(self.position, self.dataset_size)
        in_first = -(-(self.dataset_size - first) // self.global_batch_size)
        if number < in_first:
            first += number * self.global_batch_size
        else:
            further, place = divmod(number - in_first, self.steps_per_epoch)
            epoch, first = epoch + 1 + further, place * self.global_batch_size
        return Batch(step=step, epoch=epoch, first=first, size=min(self.global_batch_size, self.dataset_size - first))

    def resized(self, committed: int, batch_size: int) -> "IslandSampler":
        """The same order, with `batch_size` samples a step after step `committed`."""
        position = self.position
        if committed > self.after:
            last = self.batch(committed)
            position = last.epoch * self.dataset_size + last.first + last.size
        return self.at(committed, position, batch_size)

    def at(self, committed: int, position: int, batch_size: int) -> "IslandSampler":
        """The same order from `position` on, after step `committed`."""
        return IslandSampler(
            dataset_size=self.dataset_size,
            global_batch_size=batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            whole_batch_size=self.whole_batch_size,
            after=committed,
            position=position,
        )


def of_island(sampler: Sampler, island: str) -> IslandSampler:
    """The island's own order, with the batch of all islands together."""
    return IslandSampler(
        dataset_size=sampler.dataset_size,
        global_batch_size=sampler.global_batch_size,
        seed=seed_for(_KEY_ISLAND, sampler.seed, crc32(island.encode())),
        shuffle=sampler.shuffle,
        whole_batch_size=sampler.global_batch_size,
    )
