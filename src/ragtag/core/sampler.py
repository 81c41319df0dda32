"""Which samples a step has: a pure function of (seed, step, global batch size), the same on every rank.

The one idea: a shuffled epoch is never stored. A keyed Feistel network permutes the positions and is evaluated at the
positions asked for, so memory is O(1) and a rank pays only for the samples it reads.
"""

from collections.abc import Iterable
from functools import lru_cache
from math import isqrt

from ragtag.core.errors import SettingError
from ragtag.core.mixing import MASK64, seed_for
from ragtag.core.values import Batch

_SMALL_DOMAIN = 1 << 10
_ROUNDS_SMALL = 12
_ROUNDS = 8
_KEY_SHUFFLE = 0x5A_4D_50_4C_52  # keeps these keys apart from every other use of the run's seed


class Sampler:
    """The order of an epoch's samples, cut into global batches; every index occurs exactly once an epoch.

    The last batch of an epoch is smaller where the batch size does not divide the dataset; a batch larger than the
    dataset is the whole dataset.

    Raises:
        SettingError: `dataset_size` or `global_batch_size` is below 1.
    """

    def __init__(self, *, dataset_size: int, global_batch_size: int, seed: int, shuffle: bool) -> None:
        for name, value in (("dataset_size", dataset_size), ("global_batch_size", global_batch_size)):
            if value < 1:
                raise SettingError(f"{name} = {value} is not valid. Expected a whole number of samples, at least 1.")
        self.dataset_size = dataset_size
        self.global_batch_size = global_batch_size
        self.whole_batch_size = global_batch_size
        """Of all islands together, where there are several."""
        self.seed = seed
        self.shuffle = shuffle
        self.steps_per_epoch = -(-dataset_size // global_batch_size)

    def batch(self, step: int) -> Batch:
        """Return which positions of which epoch step `step` has; steps count from 1, epochs and positions from 0."""
        assert step >= 1, f"steps count from 1, got {step}"
        epoch, step_in_epoch = divmod(step - 1, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch_size
        size = min(self.global_batch_size, self.dataset_size - first)
        return Batch(step=step, epoch=epoch, first=first, size=size)

    def index(self, epoch: int, position: int) -> int:
        """Return the dataset index at `position` of `epoch`, both counted from 0."""
        assert 0 <= position < self.dataset_size, f"position {position} of a dataset of {self.dataset_size}"
        return self._order(epoch, (position,))[0]

    def indices(self, step: int, start: int, stop: int) -> tuple[int, ...]:
        """Return the dataset indices at positions `start` to `stop` - 1 of the global batch of `step`."""
        batch = self.batch(step)
        assert 0 <= start <= stop <= batch.size, f"positions {start}..{stop} of a batch of {batch.size}"
        return self._order(batch.epoch, range(batch.first + start, batch.first + stop))

    def _order(self, epoch: int, positions: Iterable[int]) -> tuple[int, ...]:
        if not self.shuffle:
            return tuple(positions)
        return permute(positions, self.dataset_size, _epoch_key(self.seed, epoch))


def permute(positions: Iterable[int], size: int, key: int) -> tuple[int, ...]:
    """Return where the keyed pseudo-random permutation of [0, size) sends each of `positions`.

    A generalised Feistel network on Z_rows x Z_columns with cycle walking: Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains" (CT-RSA 2002). The domain is a little larger than `size`; a result outside is permuted again
    until it falls inside, which keeps the map a bijection. Rows and columns near sqrt(size) make that rare, except
    for tiny sizes, where the slack also lets odd permutations occur.
    """
    rows, columns, keys = _network(size, key)
    result = []
    for position in positions:
        value = position
        while True:
            row, column = divmod(value, columns)
            # The round function is mix64 less its last shift, written out: a call would cost as much as the mixing.
            for row_key, column_key in keys:
                word = ((column ^ row_key) * 0xBF58476D1CE4E5B9) & MASK64
                row = (row + ((((word ^ (word >> 29)) * 0x94D049BB133111EB) & MASK64) >> 32)) % rows
                word = ((row ^ column_key) * 0xBF58476D1CE4E5B9) & MASK64
                column = (column + ((((word ^ (word >> 29)) * 0x94D049BB133111EB) & MASK64) >> 32)) % columns
            value = row * columns + column
            if value < size:
                break
        result.append(value)
    return tuple(result)


@lru_cache(maxsize=8)
def _epoch_key(seed: int, epoch: int) -> int:
    return seed_for(_KEY_SHUFFLE, seed, epoch)


@lru_cache(maxsize=8)
def _network(size: int, key: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    rows = max(4, isqrt(size) + 1)
    columns = max(4, size // rows + 1)
    # A round moves log2(domain) bits of choice, and a small domain has few: it needs more rounds to forget its start.
    rounds = _ROUNDS_SMALL if rows * columns <= _SMALL_DOMAIN else _ROUNDS
    keys = [seed_for(key, number) for number in range(rounds)]
    return rows, columns, tuple(zip(keys[::2], keys[1::2], strict=True))
