"""When a device would be done with so many samples, at best over the micro-batch sizes and recompute it may choose.

The one idea: a device's share matters to the others only through one number that never falls with the share: when the
sum over all ranks would be complete if this device were the last one. Sharing out then needs nothing else.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from ragtag.core.profile import DeviceProfile
from ragtag.cost.device import backward_s, curve, even_s, largest_micro_batch, memory_bytes, split_s
from ragtag.cost.device import constant_s as own_constant_s
from ragtag.cost.reduction import Line

NOTHING_TO_REDUCE = (Line(0.0, 0.0),)

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
        constant_s: seconds that do not shrink with the share; None: as measured.
        hides: whether any of the reduction goes on behind its last backward.
    """

    def __init__(
        self,
        device: DeviceProfile,
        options: Sequence[Option],
        *,
        limit: int | None = None,
        unit: int = 1,
        constant_s: float | None = None,
        hides: bool = True,
    ) -> None:
        self.device = device
        self.options = tuple(options)
        self.limit = limit if self.options else 0
        self.unit = unit
        self.constant_s = own_constant_s(device) if constant_s is None else constant_s
        self._hides = hides
        self._curves = {recompute: curve(device, recompute=recompute) for recompute in (False, True)}
        self._known: dict[int, tuple[tuple[float, float], ...]] = {}

    def ends_s(self, units: int) -> tuple[tuple[float, float], ...]:
        """Return (own work done, of it the last backward, which may hide reduction) for every option, in seconds from
        the step's start."""
        known = self._known.get(units)
        if known is None:
            known = self._known[units] = self._work_out(units)
        return known

    def end_s(self, units: int, lines: Sequence[Line]) -> float:
        """Return when the sum is complete if this rank is the last; `lines` say how long after its own work.

        A rank without a share has all its buckets, full of zeros, at once.
        """
        if units == 0:
            return self.constant_s + max([left_s for _, left_s in lines])
        best_s = inf
        for end_s, backward in self.ends_s(units):
            latest_s = 0.0
            for hidden, left_s in lines:
                after_s = end_s - hidden * backward + left_s
                if after_s > latest_s:
                    latest_s = after_s
            if latest_s < best_s:
                best_s = latest_s
        return best_s

    def choose(self, units: int, lines: Sequence[Line]) -> Option:
        """Return the option that ends first, the earlier named one of equals."""
        ends = [max([end_s + line.after_s(backward) for line in lines]) for end_s, backward in self.ends_s(units)]
        return self.options[ends.index(min(ends))]

    def work_s(self, units: int, lines: Sequence[Line]) -> float:
        """Return the seconds of forward and backward, of the option that `choose` returns."""
        if units == 0:
            return 0.0
        end_s, _ = self.ends_s(units)[self.options.index(self.choose(units, lines))]
        return end_s - self.constant_s - units * self.unit * self.device.data_s

    def most(self, until_s: float, lines: Sequence[Line], *, guess: int, total: int) -> int:
        """Return the most units, at most `total`, with which it is done by `until_s`; searched for from `guess` on."""
        limit = total if self.limit is None else min(total, self.limit // self.unit)
        low, high, stride = 0, limit, 1
        probe = min(max(guess, 1), limit)
        while low < high:
            if self.end_s(probe, lines) <= until_s:
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
            last_s = backward_s(self.device, (samples - 1) % size + 1, option.recompute) if self._hides else 0.0
            ends.append((end_s, last_s))
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
