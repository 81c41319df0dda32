"""When a device would be done with so many samples, at best over the micro-batch sizes and recompute it may choose.

The one idea: a device's share matters to the others only through one number that never falls with the share: when the
sum over all ranks would be complete if this device were the last one. Sharing out then needs nothing else.
"""

from collections.abc import Sequence

import msgspec

from ragtag.core.profile import DeviceProfile
from ragtag.cost.device import backward_s, curve, even_s, largest_micro_batch, memory_bytes, split_s
from ragtag.cost.device import constant_s as own_constant_s

_OWN_SIZES = 4
"""How many micro-batch sizes a device chooses from, beside the largest that fits and its whole share at once."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to compute a share."""

    micro_batch: int | None
    """None: the whole share at once."""
    recompute: bool = False
    pieces: int = 0
    """Above 0: as many micro-batches of almost equal size, whatever the share; `micro_batch` is not looked at."""


class Load:
    """One device (or several equal ones) in one layout; remembers what it worked out.

    Args:
        device: its measurements.
        options: ways to compute; none: it can compute nothing, and may still take part with no share.
        limit: most samples of a step; None: any number.
        unit: samples that are computed together; above 1 a micro-batch is one unit, whatever the options say.
        hidden: part of a last backward that reduction can hide behind: 1 - 1 / number of buckets.
        constant_s: seconds that do not shrink with the share; None: as measured.
    """

    def __init__(
        self,
        device: DeviceProfile,
        options: Sequence[Option],
        *,
        limit: int | None = None,
        unit: int = 1,
        hidden: float = 0.0,
        constant_s: float | None = None,
    ) -> None:
        self.device = device
        self.options = tuple(options)
        self.limit = limit if self.options else 0
        self.unit = unit
        self.constant_s = own_constant_s(device) if constant_s is None else constant_s
        self._hidden = hidden
        self._curves = {recompute: curve(device, recompute=recompute) for recompute in (False, True)}
        self._known: dict[int, tuple[tuple[float, float], ...]] = {}

    def ends_s(self, units: int) -> tuple[tuple[float, float], ...]:
        """Return (own work done, of it hidden backward) for every option, in seconds from the step's start."""
        known = self._known.get(units)
        if known is None:
            known = self._known[units] = self._work_out(units)
        return known

    def end_s(self, units: int, first_s: float, last_s: float) -> float:
        """Return when the sum is complete if this rank is the last: `first_s` after its first bucket is ready, or
        `last_s` after its last one."""
        if units == 0:
            return self.constant_s + max(first_s, last_s)
        return min([max(end + last_s, end - hidden + first_s) for end, hidden in self.ends_s(units)])

    def choose(self, units: int, first_s: float, last_s: float) -> Option:
        """Return the option that ends first, the earlier named one of equals."""
        ends = [max(end + last_s, end - hidden + first_s) for end, hidden in self.ends_s(units)]
        return self.options[ends.index(min(ends))]

    def most(self, until_s: float, first_s: float, last_s: float, *, guess: int, total: int) -> int:
        """Return the most units, at most `total`, with which it is done by `until_s`; searched for from `guess` on."""
        limit = total if self.limit is None else min(total, self.limit // self.unit)
        low, high, stride = 0, limit, 1
        probe = min(max(guess, 1), limit)
        while low < high:
            if self.end_s(probe, first_s, last_s) <= until_s:
                low = probe
                probe = low + stride if low + stride < high else (low + high + 1) // 2
            else:
                high = probe - 1
                probe = high - stride if low < high - stride else (low + high + 1) // 2
            stride *= 4
        return low

    def _work_out(self, units: int) -> tuple[tuple[float, float], ...]:
        ends = []
        samples = units * self.unit
        for option in self.options:
            own = self._curves[option.recompute]
            start_s = self.constant_s + samples * self.device.data_s
            if option.pieces and self.unit == 1:
                size = -(-samples // option.pieces)
                end_s = start_s + even_s(own, samples, option.pieces)
            else:
                size = self.unit if self.unit > 1 else option.micro_batch or samples
                end_s = start_s + split_s(own, samples, size)
            hidden_s = 0.0
            if self._hidden:
                hidden_s = self._hidden * backward_s(self.device, (samples - 1) % size + 1, option.recompute)
            ends.append((end_s, hidden_s))
        return tuple(ends)


def own_options(device: DeviceProfile, *, unit: int = 1, recompute: bool = False) -> tuple[Option, ...]:
    """Return the ways among which a device chooses for itself: sizes that fit, with and without recompute.

    Where nothing limits it, the whole share at once is one of them. Otherwise all sizes that fit where they are few,
    else the largest, and the measured sizes and powers of two that take least time a sample.
    """
    options: list[Option] = []
    for again in (False, True) if recompute else (False,):
        if again and memory_bytes(device, 1, recompute=True) is None:
            continue
        largest = largest_micro_batch(device, again)
        if largest is not None and largest < unit:
            continue
        if unit > 1:
            sizes: list[int | None] = [unit]
        elif largest is None:
            sizes = [None, *_quickest(device, [timing.samples for timing in device.timings])]
        elif largest <= 2 * _OWN_SIZES:
            sizes = [*range(largest, 0, -1)]
        else:
            smaller = {timing.samples for timing in device.timings} | {2**power for power in range(24)}
            sizes = [largest, *_quickest(device, [size for size in sorted(smaller) if size < largest])]
        options += [Option(micro_batch=size, recompute=again) for size in sizes]
    return tuple(options)


def _quickest(device: DeviceProfile, sizes: Sequence[int]) -> list[int]:
    own = curve(device)
    return sorted(sizes, key=lambda size: (own.at(size) / size, -size))[:_OWN_SIZES]
