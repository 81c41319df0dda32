"""One step's bag of units: the one place that knows which unit is whose, and which rank's gradient sum holds it.

The one idea: planned shares, a pulled tail, an out-of-memory retry and a dead rank's work are all entries in the same
book, and a gradient sum is tied to the exact set of units it holds. Plans and claims say who should compute a unit;
only the contents of the sums say what was computed.

A unit is in one of four states: *planned* for a rank (others may claim it), *claimed* by a rank (nobody else may),
*summed* in a rank's sum, or *missing*: its rank, or the sum that held it, is gone. A whole-step redo is a new Ledger.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import lt

from ragtag.core.mixing import sample_hash

_MASK32 = (1 << 32) - 1


class LedgerError(AssertionError):
    """A move the ledger does not allow. It is a bug in ragtag, never a user's mistake."""


class Ledger:
    """The units of step `step`, whose global batch has `samples` samples.

    The batch is cut into runs of `unit` positions, in order; the last may be shorter. Ranks are planned contiguous
    runs of units in rank order, `units_per_rank[r]` for rank r.

    Each rank keeps its own ledger. It records its own sum as it grows; it learns of other ranks' sums only when they
    are compared (`settle`), so in an undisturbed step `complete` is answered by the hashes, not by one ledger.
    """

    def __init__(self, *, step: int, samples: int, unit: int, units_per_rank: Sequence[int]) -> None:
        self.step = step
        self.samples = samples
        self.unit = unit
        self.num_units = -(-samples // unit)
        self.world_size = len(units_per_rank)
        if samples < 1 or unit < 1 or min(units_per_rank) < 0 or sum(units_per_rank) != self.num_units:
            raise LedgerError(
                f"step {step}: {samples} samples in units of {unit} are {self.num_units} units, "
                f"but the ranks are planned {tuple(units_per_rank)}"
            )
        self._ends = tuple(accumulate(units_per_rank))
        self._todo = [set(range(end - count, end)) for end, count in zip(self._ends, units_per_rank, strict=True)]
        self._sums: list[set[int]] = [set() for _ in units_per_rank]
        self._claims: dict[int, int] = {}
        self._missing: set[int] = set()

    def span(self, unit: int) -> tuple[int, int]:
        """Return `unit`'s positions in the global batch, (start, stop)."""
        self._check_units((unit,))
        return unit * self.unit, min((unit + 1) * self.unit, self.samples)

    def owner(self, unit: int) -> int | None:
        """Return the rank that is to compute `unit` or whose sum holds it; None: it is missing."""
        self._check_units((unit,))
        if unit in self._missing:
            return None
        planned = bisect_right(self._ends, unit)
        # A moved unit is a claim or in another's sum; looking there first would slow down the usual case.
        if unit in self._todo[planned] or unit in self._sums[planned]:
            return planned
        if unit in self._claims:
            return self._claims[unit]
        return next(rank for rank, held in enumerate(self._sums) if unit in held)

    def todo(self, rank: int) -> tuple[int, ...]:
        """Return the units that `rank` is planned or has claimed and not yet summed, in order."""
        return tuple(sorted(self._todo[rank]))

    def claim(self, unit: int, rank: int) -> None:
        """Give `unit`, planned for any rank, to `rank` for good: nobody else may claim it. Claiming twice is harmless.

        Raises:
            LedgerError: the unit is summed, missing, or claimed by another rank.
        """
        self._check_rank(rank)
        owner = self.owner(unit)
        if owner is None or unit in self._sums[owner] or self._claims.get(unit, rank) != rank:
            raise LedgerError(f"step {self.step}: rank {rank} cannot claim unit {unit}, which is {self._state(unit)}")
        self._todo[owner].remove(unit)
        self._todo[rank].add(unit)
        self._claims[unit] = rank

    def record_sum(self, rank: int, units: Collection[int]) -> None:
        """Note that `rank` has added `units` to its sum; call it together with the addition itself.

        Raises:
            LedgerError: a unit occurs twice, or is not (or no longer) `rank`'s to compute; then nothing is recorded.
        """
        self._check_rank(rank)
        added = set(units)
        if len(added) != len(units):
            raise LedgerError(f"step {self.step}: rank {rank} added a unit twice: {tuple(units)}")
        if not added <= self._todo[rank]:
            wrong = min(added - self._todo[rank])
            self._check_units((wrong,))
            raise LedgerError(f"step {self.step}: rank {rank} cannot add unit {wrong}, which is {self._state(wrong)}")
        self._todo[rank] -= added
        self._sums[rank] |= added
        if self._claims:
            for unit in added:
                self._claims.pop(unit, None)

    def drop(self, rank: int) -> None:
        """Throw away `rank`'s sum, as after running out of memory; its units are again its own to compute."""
        self._check_rank(rank)
        for unit in self._sums[rank]:
            self._claims[unit] = rank
        self._todo[rank] |= self._sums[rank]
        self._sums[rank] = set()

    def void(self, rank: int) -> None:
        """Take everything from `rank`, which is gone: what it summed and what it was to compute is missing now."""
        self._check_rank(rank)
        for unit in self._todo[rank]:
            self._claims.pop(unit, None)
        self._missing |= self._todo[rank] | self._sums[rank]
        self._todo[rank], self._sums[rank] = set(), set()

    def settle(self, contents: Sequence[Collection[int]]) -> tuple[int, ...]:
        """Forget plans and claims and believe the sums: `contents[r]` is what rank r's sum really holds.

        Where two sums hold the same unit the later rank's sum is void. All units that no kept sum holds are missing.

        Returns:
            The ranks that must throw their sums away, in order.

        Raises:
            LedgerError: not one entry a rank, or one sum holds a unit twice or a unit that does not exist.
        """
        if len(contents) != self.world_size:
            raise LedgerError(f"step {self.step}: contents of {len(contents)} sums for {self.world_size} ranks")
        for rank, held in enumerate(contents):
            self._check_units(held)
            if len(set(held)) != len(held):
                raise LedgerError(f"step {self.step}: the sum of rank {rank} holds a unit twice: {tuple(held)}")
        dropped = []
        self._missing = set(range(self.num_units))
        self._claims = {}
        self._todo = [set() for _ in contents]
        self._sums = [set() for _ in contents]
        for rank, held in enumerate(contents):
            if self._missing.issuperset(held):
                self._sums[rank] = set(held)
                self._missing -= self._sums[rank]
            else:
                dropped.append(rank)
        return tuple(dropped)

    def missing(self) -> tuple[int, ...]:
        """Return the units that are nobody's, in order: to be given out with `assign`."""
        return tuple(sorted(self._missing))

    def assign(self, unit: int, rank: int) -> None:
        """Give the missing `unit` to `rank`, as if claimed.

        Raises:
            LedgerError: the unit is not missing.
        """
        self._check_rank(rank)
        if unit not in self._missing:
            self._check_units((unit,))
            raise LedgerError(
                f"step {self.step}: unit {unit} for rank {rank} is not missing: it is {self._state(unit)}"
            )
        self._missing.remove(unit)
        self._todo[rank].add(unit)
        self._claims[unit] = rank

    def contents(self, rank: int) -> tuple[int, ...]:
        """Return the units that `rank`'s sum holds, in order."""
        return tuple(sorted(self._sums[rank]))

    def contents_hash(self, rank: int) -> int:
        """Return the 32-bit hash of what `rank`'s sum holds; see `expected_hash`."""
        return self._keyed(sum(map(_unit_hashes(self.num_units).__getitem__, self._sums[rank])))

    @property
    def expected_hash(self) -> int:
        """What the ranks' `contents_hash` add up to modulo 2**32 when every unit is in exactly one sum.

        Any other distribution gives the same total with a probability of about 2**-32.
        """
        return self._keyed(_total_hash(self.num_units))

    @property
    def complete(self) -> bool:
        """Whether the sums recorded here hold every unit."""
        return sum(map(len, self._sums)) == self.num_units

    def samples_of(self, rank: int) -> int:
        """Return the number of samples in all units of `rank`: planned, claimed or summed."""
        units = len(self._todo[rank]) + len(self._sums[rank])
        last = self.num_units - 1
        short = self.num_units * self.unit - self.samples
        has_last = last in self._todo[rank] or last in self._sums[rank]
        return units * self.unit - (short if has_last else 0)

    def summed_samples(self, rank: int) -> int:
        """Return the number of samples that `rank`'s sum holds."""
        held = self._sums[rank]
        short = self.num_units * self.unit - self.samples
        return len(held) * self.unit - (short if self.num_units - 1 in held else 0)

    def _keyed(self, total: int) -> int:
        # An odd factor loses nothing and makes one step's contents useless in another.
        return total * (sample_hash(self.step) | 1) & _MASK32

    def _check_units(self, units: Collection[int]) -> None:
        if units and not (min(units) >= 0 and max(units) < self.num_units):
            raise LedgerError(f"step {self.step}: units {tuple(units)[:8]} are not all in 0..{self.num_units - 1}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LedgerError(f"step {self.step}: rank {rank} is not in 0..{self.world_size - 1}")

    def _state(self, unit: int) -> str:
        owner = self.owner(unit)
        if owner is None:
            return "missing"
        if unit in self._sums[owner]:
            return f"in the sum of rank {owner}"
        return f"claimed by rank {owner}" if unit in self._claims else f"planned for rank {owner}"


def micro_batches(ledger: Ledger, units: Sequence[int], size: int | None) -> list[tuple[int, ...]]:
    """Cut ascending `units` into micro-batches of at most `size` samples (None: no limit), in order.

    A unit of several samples is a micro-batch of its own, whatever `size` is. Units of one sample are taken together
    while their positions are consecutive: full micro-batches, then one remainder for each consecutive run.
    """
    if ledger.unit > 1:
        return [(unit,) for unit in units]
    size = size or len(units)
    if not all(map(lt, units, units[1:])):
        raise LedgerError(f"step {ledger.step}: units to compute do not ascend: {tuple(units)[:8]}")
    batches = []
    run = 0
    while run < len(units):
        # `units` ascends, so the run reaches as far as units[i] - i stays the same.
        offset = units[run] - run
        end = bisect_right(range(run, len(units)), offset, key=lambda place: units[place] - place) + run
        batches.extend(tuple(units[start : min(start + size, end)]) for start in range(run, end, size))
        run = end
    return batches


@lru_cache(maxsize=4)
def _unit_hashes(num_units: int) -> tuple[int, ...]:
    return tuple(sample_hash(unit) for unit in range(num_units))


@lru_cache(maxsize=4)
def _total_hash(num_units: int) -> int:
    return sum(_unit_hashes(num_units))
