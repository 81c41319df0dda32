"""How fast one rank computes: seconds for n samples, followed through noise, odd steps, changes and drift.

The one idea: keep the steps since the last change and nothing older. A change is when the newest steps agree with each
other and not with those before (Bifet and Gavalda, "Learning from time-changing data with adaptive windowing", 2007):
one odd step never does, two are enough when the noise is small.
"""

from typing import NamedTuple

import msgspec

from ragtag.control.change import Change, find_change
from ragtag.control.fixed_cost import Block, FixedCost
from ragtag.control.robust import appended, log_ratio, median, midmean, midmean_of_ordered, upper_quartile_of_ordered
from ragtag.control.window import WINDOW, Window, window_of

_JUMPS = 32
_DEVIATIONS = 16
_UNSEEN_JUMPS = (0.1, 0.1, 0.1)
"""Differences between steps that are assumed before enough were seen."""
_LEAST_NOISE = 0.01
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""A step's time between which it is believed to have been measured."""
_LEAST_PATIENCE, _MOST_PATIENCE = 2, 32
_MEMORY = 8
"""A rank that gets slower again within `_MEMORY` times its patience of getting faster is flapping."""
_LONG_AGO = 1 << 30
_BLOCK = 2
"""Steps after a change of share that make up one mean: no more than a plan runs before it may be changed again."""
_AGREE = 0.3


class Step(NamedTuple):
    """One step of one rank."""

    samples: int
    micro_batches: int
    seconds: float
    planned: bool = True
    """False: luck decided how many samples it were, so they say nothing about fixed costs."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's compute time: level_s * (fixed cost in samples + n), with its window of steps."""

    steps: tuple[Step, ...] = ()
    """Those since the last change, newest last, at most `WINDOW`."""
    window: Window = Window()
    """Seconds a sample in each of `steps`."""
    level_s: float = 0.0
    """Seconds a sample; 0: never measured."""
    fixed: FixedCost = FixedCost()
    jumps: tuple[float, ...] = ()
    """Relative differences between neighbouring steps, without sign: what is left of them when the level moves."""
    usual_jump: float = median(_UNSEEN_JUMPS)
    """Median of `jumps` and of those assumed before enough were seen."""
    deviations: tuple[float, ...] = ()
    """Recent steps' times as multiples of the usual one of their moment, newest last; outlives changes of level."""
    before: Block | None = None
    """The block of steps before the last change of share."""
    patience: int = _LEAST_PATIENCE
    """How many steps in a row must be faster before they are believed; grows when a rank flaps between two speeds."""
    since_faster: int = _LONG_AGO
    """Steps since it last became faster."""
    since_change: int = 0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to act on: three, or two that agree."""
        if len(self.steps) != 2:
            return len(self.steps) > 2
        first, second = self.window.levels
        return abs(log_ratio(second, first)) < _AGREE

    @property
    def noise(self) -> float:
        """Relative standard deviation of one step around the level, from the median difference of neighbours."""
        # 1.4826 turns a median of absolute normal values into a standard deviation, sqrt(2) that of a difference.
        noise = 1.4826 / 1.4142 * self.usual_jump
        return noise if noise > _LEAST_NOISE else _LEAST_NOISE

    def time_s(self, samples: int, micro_batches: int) -> float:
        """Predicted seconds for `samples` in `micro_batches` forwards; does not decrease with either."""
        return self.level_s * self.fixed.size(samples, micro_batches)

    def observe(self, samples: int, micro_batches: int, seconds: float, planned: bool = True) -> "Speed":
        """Return the speed after one more step; a step without samples or with an impossible time says nothing.

        Where a step's samples were not `planned` (pulled, or another rank's), a fast step gets more of them: that must
        not pass for a fixed cost.
        """
        since_faster, since_change = self.since_faster + 1, self.since_change + 1
        if samples <= 0 or micro_batches <= 0 or not _SHORTEST_S < seconds < _LONGEST_S:
            return msgspec.structs.replace(self, since_faster=since_faster, since_change=since_change)
        speed = _append(self, Step(samples, micro_batches, seconds, planned), since_faster, since_change)
        return _follow(_learn_fixed_cost(speed))


def _append(speed: Speed, step: Step, since_faster: int, since_change: int) -> Speed:
    steps, before = speed.steps, speed.before
    jumps, usual_jump = speed.jumps, speed.usual_jump
    level = step.seconds / speed.fixed.size(step.samples, step.micro_batches)
    if steps:
        samples = steps[-1].samples
        if step.samples != samples:
            before = _newest_block(speed) or before
        if _alike(step.samples, samples):
            jumps, usual_jump = _with_jump(jumps, usual_jump, abs(log_ratio(level, speed.window.levels[-1])))
    return msgspec.structs.replace(
        speed,
        steps=appended(steps, step, WINDOW),
        window=speed.window.append(level),
        jumps=jumps,
        usual_jump=usual_jump,
        before=before,
        since_faster=since_faster,
        since_change=since_change,
    )


def _with_jump(jumps: tuple[float, ...], usual: float, jump: float) -> tuple[tuple[float, ...], float]:
    after = appended(jumps, jump, _JUMPS)
    # A median stays where it is when one value above it replaces another, or one below.
    if len(jumps) < _JUMPS or (jump - usual) * (jumps[0] - usual) <= 0:
        usual = median(after + _UNSEEN_JUMPS)
    return after, usual


def _alike(samples: int, others: int) -> bool:
    """Whether two shares are so near each other that a wrong fixed cost hardly shows between them."""
    return 4 * abs(samples - others) <= max(samples, others)


def _newest_block(speed: Speed) -> Block | None:
    """The newest steps with the same planned share, at most five, if there are two."""
    steps, newest = speed.steps, speed.steps[-1]
    if not newest.planned:
        return None
    count = 1
    while count < min(5, len(steps)) and steps[-1 - count].planned and steps[-1 - count].samples == newest.samples:
        count += 1
    if count < 2:
        return None
    return Block(
        samples=newest.samples,
        micro_batches=newest.micro_batches,
        seconds=midmean([step.seconds for step in steps[-count:]]),
        steps=count,
    )


def _learn_fixed_cost(speed: Speed) -> Speed:
    """Take the fixed cost from the blocks of steps before and after a change of share, once both are there."""
    if speed.before is None:
        return speed
    after = _newest_block(speed)
    if after is None or after.steps < _BLOCK:
        return speed
    newest, noise = [step.seconds for step in speed.steps[-after.steps :]], speed.noise
    # Speed that changes in the very steps compared is not evidence about shares.
    if log_ratio(max(newest), min(newest)) >= 4 * noise:
        return msgspec.structs.replace(speed, before=None)
    fixed = speed.fixed.learn(speed.before, after, noise)
    levels = [step.seconds / fixed.size(step.samples, step.micro_batches) for step in speed.steps]
    return msgspec.structs.replace(speed, fixed=fixed, window=window_of(levels), before=None)


def _follow(speed: Speed) -> Speed:
    """Forget the steps before a change, and set the level."""
    flapping = speed.patience > _LEAST_PATIENCE
    change = find_change(speed.window, speed.noise, patience=speed.patience, flapping=flapping)
    deviations = speed.deviations
    if change:
        speed = _forget_before(speed, change)
        # They were not deviations of the level before.
        deviations = deviations[: max(len(deviations) - change.newest + 1, 0)]
    # Of a rank that flaps, the slower speed is planned for: too little work costs less than too much.
    average = upper_quartile_of_ordered if flapping or speed.patience > _LEAST_PATIENCE else midmean_of_ordered
    if flapping and not change and speed.since_change > _MEMORY * speed.patience:
        speed = msgspec.structs.replace(speed, patience=_LEAST_PATIENCE, since_change=0)
    level_s = average(speed.window.ordered)
    for level in speed.window.levels if change else speed.window.levels[-1:]:
        deviations = appended(deviations, level / level_s, _DEVIATIONS)
    return msgspec.structs.replace(speed, level_s=level_s, deviations=deviations)


def _forget_before(speed: Speed, change: Change) -> Speed:
    newest, patience = change.newest, speed.patience
    since_faster, since_change = speed.since_faster, speed.since_change
    # A level that moved together with the share says that the fixed cost is off, not that the speed changed.
    if _alike(speed.steps[-newest].samples, speed.steps[-newest - 1].samples):
        if change.faster:
            since_faster = 0
        elif since_faster < _MEMORY * patience:
            patience = min(4 * patience, _MOST_PATIENCE)
        since_change = 0
    return msgspec.structs.replace(
        speed,
        steps=speed.steps[-newest:],
        window=window_of(speed.window.levels[-newest:]),
        patience=patience,
        since_faster=since_faster,
        since_change=since_change,
    )
