"""How fast one rank computes: seconds for n samples, followed through noise, odd steps, changes and drift.

The one idea: keep the steps since the last change and nothing older. A change is when the newest steps agree with each
other and not with those before (Bifet and Gavalda, "Learning from time-changing data with adaptive windowing", 2007):
one odd step never does, two are enough when the noise is small.
"""

import msgspec

from ragtag.control.fixed_cost import Block, FixedCost
from ragtag.control.robust import log_ratio, median, midmean, upper_quartile

WINDOW = 128
"""Most steps that a speed is averaged over."""

_JUMPS = 32
_DEVIATIONS = 16
_UNSEEN_JUMPS = (0.1, 0.1, 0.1)
"""Differences between steps that are assumed before enough were seen."""
_LEAST_NOISE = 0.01
_NEWEST = (2, 3, 4, 6, 10, 20, 40)
"""Numbers of newest steps that are compared with those before them."""
_FEW = {2: 3.0, 3: 1.0, 4: 1.0}
"""Standard deviations that each of so few newest steps must be off."""
_MORE_STEPS = 25.0
"""Square of how many standard errors the median of three or more newest steps must be off."""
_LEAST_PATIENCE, _MOST_PATIENCE = 2, 32
_MEMORY = 8
"""A rank that gets slower again within `_MEMORY` times its patience of getting faster is flapping."""
_BLOCK = 2
"""Steps after a change of share that make up one mean: no more than a plan runs before it may be changed again."""
_AGREE = 0.3


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's compute time: level_s * (fixed cost in samples + n), with its window of steps, newest last."""

    samples: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    level_s: float = 0.0
    """Seconds a sample; 0: never measured."""
    fixed: FixedCost = FixedCost()
    jumps: tuple[float, ...] = ()
    """Relative differences between neighbouring steps, without sign: what is left of them when the level moves."""
    deviations: tuple[float, ...] = ()
    """Recent steps' times as multiples of the usual one of their moment, newest last; outlives changes of level."""
    before: Block | None = None
    """The block of steps before the last change of share."""
    patience: int = _LEAST_PATIENCE
    """How many steps in a row must be faster before they are believed; grows when a rank flaps between two speeds."""
    since_faster: int = 1 << 30
    """Steps since it last became faster."""
    since_change: int = 0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to act on: three, or two that agree."""
        if len(self.seconds) != 2:
            return len(self.seconds) > 2
        first, second = self.levels()
        return abs(log_ratio(second, first)) < _AGREE

    @property
    def noise(self) -> float:
        """Relative standard deviation of one step around the level, from the median difference of neighbours."""
        # 1.4826 turns a median of absolute normal values into a standard deviation, sqrt(2) that of a difference.
        return max(_LEAST_NOISE, 1.4826 / 1.4142 * median(self.jumps + _UNSEEN_JUMPS))

    def levels(self) -> list[float]:
        """Seconds a sample in each step of the window."""
        size = self.fixed.size
        return [y / size(n, k) for n, k, y in zip(self.samples, self.micro_batches, self.seconds)]

    def time_s(self, samples: int, micro_batches: int) -> float:
        """Predicted seconds for `samples` in `micro_batches` forwards; does not decrease with either."""
        return self.level_s * self.fixed.size(samples, micro_batches)

    def observe(self, samples: int, micro_batches: int, seconds: float) -> "Speed":
        """Return the speed after one more step; a step without samples or with an impossible time says nothing."""
        aged = msgspec.structs.replace(
            self, since_faster=min(self.since_faster + 1, 1 << 30), since_change=self.since_change + 1
        )
        if samples <= 0 or micro_batches <= 0 or not 0 < seconds < 1e9:
            return aged
        return _follow(_learn_fixed_cost(_append(aged, samples, micro_batches, seconds)))


def _append(speed: Speed, samples: int, micro_batches: int, seconds: float) -> Speed:
    jumps, before = speed.jumps, speed.before
    if speed.samples:
        if samples != speed.samples[-1]:
            before = _newest_block(speed) or before
        if _alike(samples, speed.samples[-1]):
            last = speed.seconds[-1] / speed.fixed.size(speed.samples[-1], speed.micro_batches[-1])
            now = seconds / speed.fixed.size(samples, micro_batches)
            jumps = (*jumps, abs(log_ratio(now, last)))[-_JUMPS:]
    return msgspec.structs.replace(
        speed,
        samples=(*speed.samples, samples)[-WINDOW:],
        micro_batches=(*speed.micro_batches, micro_batches)[-WINDOW:],
        seconds=(*speed.seconds, seconds)[-WINDOW:],
        jumps=jumps,
        before=before,
    )


def _alike(samples: int, others: int) -> bool:
    """Whether two shares are so near each other that a wrong fixed cost hardly shows between them."""
    return 4 * abs(samples - others) <= max(samples, others)


def _newest_block(speed: Speed) -> Block | None:
    """The newest steps with the same share, at most five, if there are two."""
    steps = 0
    while steps < min(5, len(speed.samples)) and speed.samples[-1 - steps] == speed.samples[-1]:
        steps += 1
    if steps < 2:
        return None
    return Block(
        samples=speed.samples[-1],
        micro_batches=speed.micro_batches[-1],
        seconds=midmean(speed.seconds[-steps:]),
        steps=steps,
    )


def _learn_fixed_cost(speed: Speed) -> Speed:
    if speed.before is None:
        return speed
    after = _newest_block(speed)
    if after is None or after.steps < _BLOCK:
        return speed
    newest, noise = speed.seconds[-after.steps :], speed.noise
    fixed = speed.fixed
    # Speed that changes in the very steps compared is not evidence about shares.
    if log_ratio(max(newest), min(newest)) < 4 * noise:
        fixed = fixed.learn(speed.before, after, noise)
    return msgspec.structs.replace(speed, fixed=fixed, before=None)


def _follow(speed: Speed) -> Speed:
    """Forget the steps before a change, and set the level."""
    flapping = speed.patience > _LEAST_PATIENCE
    # Of a rank that flaps, the slower speed is planned for: too little work costs less than too much.
    average = upper_quartile if flapping else midmean
    levels = speed.levels()
    change = _find_change(speed, levels)
    unexplained = 1
    patience, since_faster, since_change = speed.patience, speed.since_faster, speed.since_change
    if change:
        newest, faster = change
        # A level that moved together with the share says that the fixed cost is off, not that the speed changed.
        if _alike(speed.samples[-newest], speed.samples[-newest - 1]):
            if faster:
                since_faster = 0
            elif since_faster < _MEMORY * patience:
                patience = min(4 * patience, _MOST_PATIENCE)
            since_change = 0
        levels = levels[-newest:]
        unexplained = newest
        if patience > speed.patience:
            average = upper_quartile
    elif flapping and since_change > _MEMORY * patience:
        patience, since_change = _LEAST_PATIENCE, 0
    level_s = average(levels)
    settled = speed.deviations[: max(len(speed.deviations) - unexplained + 1, 0)]
    return msgspec.structs.replace(
        speed,
        samples=speed.samples[-len(levels) :],
        micro_batches=speed.micro_batches[-len(levels) :],
        seconds=speed.seconds[-len(levels) :],
        level_s=level_s,
        deviations=(*settled, *(level / level_s for level in levels[-unexplained:]))[-_DEVIATIONS:],
        patience=patience,
        since_faster=since_faster,
        since_change=since_change,
    )


def _find_change(speed: Speed, levels: list[float]) -> tuple[int, bool] | None:
    """How many of the newest steps are at a new level, and whether it is a faster one; None: no change."""
    variance = speed.noise * speed.noise
    average = upper_quartile if speed.patience > _LEAST_PATIENCE else midmean
    for newest in _NEWEST:
        older = len(levels) - newest
        if older < 1 or (newest > 2 and older < 3):
            break
        base = average(levels[:older])
        usual = log_ratio(median(levels[-newest:]), base)
        # 1.57: a median of normal values varies that much more than their mean.
        changed = usual * usual > _MORE_STEPS * 1.57 * variance * (1 / newest + 1 / older)
        if newest in _FEW:
            # Of few steps, each must be off, and on the same side: odd steps come in pairs now and then.
            sign = 1 if usual > 0 else -1
            least = min(sign * log_ratio(level, base) for level in levels[-newest:])
            needed = _FEW[newest]
            all_off = least > 0 and least * least > needed * needed * variance * (1 + 1 / older)
            changed = all_off and (changed or newest == 2)
        faster = usual < 0
        if changed and (not faster or newest >= speed.patience):
            return newest, faster
    return None
