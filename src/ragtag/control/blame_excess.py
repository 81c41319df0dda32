"""How far one number of one rank lies beyond what is expected of it, and whether that is more than luck.

The one idea: several steps, not single ones. Two far beyond the noise are as telling as eight a little beyond it (as in
the rules for control charts; Western Electric, "Statistical Quality Control Handbook", 1956), and one odd step, however
long, tells nothing. Where odd steps are common, each counts for less.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from ragtag.control.robust import median

WINDOW = 10
"""Steps within which something is found, or is not."""
_RULES = ((2, 4.0), (3, 3.2), (5, 2.5), (8, 2.0))
"""(newest steps, standard deviations that they are beyond what is expected on average): five times or more what luck
makes of an average."""
_ODD = 3.5
"""Standard deviations from which on a step is odd: of two that are found, neither is less beyond it."""
_ODD_BEFORE, _STEPS_BEFORE = 0.05, 160
"""Odd ones among so many steps that are assumed to have been before the first."""
_REMEMBERED_ODD = 100
_COUNTED = 4.5
"""Most standard deviations that one step counts for."""
_OFTEN, _FAR = 3, 8.0
"""Least steps of the window, in a row or not, that are so many standard deviations beyond it."""
_LUCK = 1e-4
"""Likelihood that so many are odd by luck."""
_LASTING, _MOST, _EACH = 6, 5, 4.0
"""Of so many newest steps, so many are so many standard deviations beyond it: for numbers that come in bursts, such as
what other programs do to a machine."""
_IN_A_ROW = ((3, 16.0), (8, 2.0))
"""Of those too, so many newest steps in a row that are so many standard deviations beyond it."""
_NEWS = 1.0
"""Least standard deviations of a step in which something is found newly."""
_LATELY = 3
_JUMPS = 48
_LOOKS_EVERY = 8
"""Steps between looks at medians, which take longer than all the rest."""
_PAST = 32
_ENOUGH, _ASSUMED = 8, 3
_KNOWN = 6
"""Steps of a rank's own past from which its usual value is known."""


class Beyond:
    """By how many standard deviations one number of one rank was beyond what was expected of it, step by step."""

    __slots__ = ("_odd", "bursts", "is_found", "newest", "num_odd")

    def __init__(self, *, bursts: bool = False) -> None:
        self.bursts = bursts
        self.newest: deque[float] = deque(maxlen=WINDOW)
        """The newest last."""
        self._odd: deque[bool] = deque(maxlen=_REMEMBERED_ODD)
        self.num_odd = 0
        """Odd ones among the `num_old` steps before, but for those of a suspect."""
        self.is_found = False
        """Whether the newest steps cannot be luck."""

    @property
    def num_old(self) -> int:
        """Steps before the newest that are remembered."""
        return len(self._odd)

    def add(self, beyond: float, odds: Callable[[], float] = lambda: 0.0, *, accused: bool = False) -> None:
        """Take in the newest step; `odds` says how likely one is to be odd by luck, about which those of a rank that is
        `accused` say nothing."""
        if len(self.newest) == WINDOW and not self.bursts and not (accused or self.is_found):
            if len(self._odd) == _REMEMBERED_ODD:
                self.num_odd -= self._odd[0]
            odd = self.newest[0] > _ODD
            self._odd.append(odd)
            self.num_odd += odd
        self.newest.append(beyond)
        if self.is_found or beyond > _NEWS:
            self.is_found = self._lasts() if self.bursts else self._cannot_be_luck(odds())

    def _lasts(self) -> bool:
        newest = list(self.newest)
        if sum([beyond > _EACH for beyond in newest[-_LASTING:]]) >= _MOST:
            return True
        return any(len(newest) >= steps and min(newest[-steps:]) > least for steps, least in _IN_A_ROW)

    def _cannot_be_luck(self, odds: float) -> bool:
        # A normal value as far out as this is as unlikely as an odd step.
        counted = min(_COUNTED, math.sqrt(-2 * math.log(odds)))
        newest = [min(beyond, counted) for beyond in self.newest]
        if any(len(newest) >= steps and sum(newest[-steps:]) > steps * least for steps, least in _RULES):
            return True
        far = sum([beyond > _FAR for beyond in self.newest])
        return far >= _OFTEN and math.comb(WINDOW, far) * odds**far < _LUCK

    @property
    def lately(self) -> float:
        """Mean of the newest steps."""
        newest = list(self.newest)[-_LATELY:]
        return sum(newest) / len(newest) if newest else 0.0

    @property
    def run(self) -> int:
        """How many of the newest steps in a row are beyond what is expected by a standard deviation."""
        count = 0
        for beyond in reversed(self.newest):
            if beyond <= 1.0:
                break
            count += 1
        return count


class Excess:
    """One number of one rank, step by step; not negative.

    Args:
        relative: noise grows with the number, as that of computing times; else it does not, as that of waiting times.
        bursts: it comes in bursts, so that only what lasts tells something.
    """

    __slots__ = ("_before", "_count", "_past", "_relative", "_waiting", "beyond", "jump", "jumps", "usual")

    def __init__(self, *, relative: bool = False, bursts: bool = False) -> None:
        self._relative = relative
        self.jumps: deque[float] = deque(maxlen=_JUMPS)
        """Differences between neighbouring steps (relative ones, where noise is), without sign."""
        self._past: deque[float] = deque(maxlen=_PAST)
        self._waiting: deque[float] = deque()
        self._before: float | None = None
        self._count = 0
        self.jump = 0.0
        """Their median."""
        self.usual: float | None = None
        """Median of this rank's own past, which ends some steps ago; None: it is too short."""
        self.beyond = Beyond(bursts=bursts)
        """Beyond what others' or, where that is less, its own past says."""

    @property
    def is_found(self) -> bool:
        """Whether the newest steps cannot be luck."""
        return self.beyond.is_found

    def follow(
        self, value: float, beyond: float, odds: Callable[[], float] = lambda: 0.0, *, accused: bool = False
    ) -> None:
        """Take in the newest value, and what `Beyond` wants of it; of a rank that is `accused`, noise is not learnt."""
        self.beyond.add(beyond, odds, accused=accused)
        before, self._before = self._before, value
        if before is not None and not accused:
            jump = abs(value - before)
            if self._relative and jump:
                jump *= 2 / (value + before)
            self.jumps.append(jump)
            self._count += 1
            if self._count <= _ENOUGH or self._count % _LOOKS_EVERY == 0:
                self.jump = median(self.jumps)

    def remember(self, value: float) -> None:
        """Count `value` as usual, once it is some steps old and nothing was found meanwhile."""
        self._waiting.append(value)
        if len(self._waiting) >= WINDOW:
            self._past.append(self._waiting.popleft())
            if len(self._past) == _KNOWN or (len(self._past) > _KNOWN and self._count % _LOOKS_EVERY == 0):
                self.usual = median(self._past)

    def doubt(self) -> None:
        """Something was found: the newest values are not usual."""
        self._waiting.clear()

    def skip(self) -> None:
        """There is no value in this step."""
        self._before = None


def odds_of(numbers: Sequence[Beyond]) -> float:
    """Return how likely a step of one of `numbers`, one a rank, is to be odd although nothing slows it down."""
    num_odd = sum([each.num_odd for each in numbers])
    return (num_odd + _ODD_BEFORE) / (sum([each.num_old for each in numbers]) + _STEPS_BEFORE)


def noise_of(numbers: Sequence[Excess], least: float, unseen: float) -> float:
    """Return the standard deviation of one step of the noisiest of `numbers`, one a rank, at least `least`; of those
    that come in bursts, of the usual one, since bursts are what is looked for.

    While little was seen of the others, some differences between steps of `unseen` are assumed.
    """
    if numbers[0].beyond.bursts:
        jump = lower_median([each.jump for each in numbers]) or 0.0
    elif any(len(each.jumps) < _ENOUGH for each in numbers):
        jump = median([*(jump for each in numbers for jump in each.jumps), *[unseen] * _ASSUMED])
    else:
        jump = max([each.jump for each in numbers])
    # 1.4826 turns a median of absolute normal values into a standard deviation, sqrt(2) that of a difference.
    return max(1.4826 / 1.4142 * jump, least)


def lower_median(values: Sequence[float]) -> float | None:
    """Return the middle one of `values`, or the lower one of the middle two; None: there are none."""
    return sorted(values)[(len(values) - 1) // 2] if values else None


def of_others(values: Sequence[float | None]) -> list[float | None]:
    """Return for each of `values` the lower median of the others that are known; None: there are none.

    The lower one: of two others, one may be slow as well, and the other is what to expect.
    """
    known = sorted([value for value in values if value is not None])
    result: list[float | None] = []
    for value in values:
        count = len(known) - (value is not None)
        if count == 0:
            result.append(None)
            continue
        middle = (count - 1) // 2
        own_is_below = value is not None and value <= known[middle]
        result.append(known[middle + own_is_below])
    return result
