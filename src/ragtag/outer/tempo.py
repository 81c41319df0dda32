"""How often islands exchange, how fast the outer optimizer goes, and who has which part of the batch.

The one idea: H is the fewest steps that hide an exchange, because fewer steps cost less progress; it follows what is
measured, with a dead zone, so that it does not swing. Where merging hurts the loss beyond noise, a guard takes measures
in a fixed order, each with its numbers.
"""

import math
from collections.abc import Callable, Mapping

import msgspec

from ragtag.core.inner_steps import HIDDEN, LEAST_INNER_STEPS, inner_steps_for
from ragtag.outer.protocol import Beat, Reading, Tempo, Wanted
from ragtag.watch.events import Event, Guarded, Retuned

_FIRST_INNER_STEPS = 25
_SLOWER, _FASTER = 1.1, 0.7
"""H moves when what it should be is beyond these multiples of it."""
_SHARE_MOVES = 0.1
_READINGS = 8
"""How many are looked at together, and no reading twice: a run has thousands, and luck is not to act."""
_BEYOND_NOISE = 5.0
"""Standard errors."""
_LEAST_RATE = 0.35


def slowest_exchange(beats: Mapping[str, Beat]) -> tuple[int, str] | None:
    """H and why, of the island for which it is largest; None: nothing is measured yet."""
    best: tuple[int, str] | None = None
    for name, beat in sorted(beats.items()):
        if beat.inner_s <= 0 or beat.outer_s <= 0:
            continue
        steps = inner_steps_for(beat.outer_s, beat.inner_s)
        if best is None or steps > best[0]:
            why = f"{name} exchanges in {beat.outer_s:.3g} s and takes {beat.inner_s:.3g} s a step"
            best = steps, f"{why}: max({LEAST_INNER_STEPS}, outer / ({HIDDEN} * inner)) = {steps}"
    return best


def shares_for(beats: Mapping[str, Beat]) -> tuple[tuple[str, float], ...]:
    """Each island's part of the batch, in proportion to its speed; empty: not all speeds are known."""
    if not beats or any(beat.samples_per_s <= 0 for beat in beats.values()):
        return ()
    total = sum(beat.samples_per_s for beat in beats.values())
    return tuple((name, beat.samples_per_s / total) for name, beat in sorted(beats.items()))


class Tuner:
    """What goes for all islands, changed by what they measure.

    Args:
        wanted: by the run's script; None: not known yet.
        tempo: as it was before the outer process was started again.
    """

    def __init__(self, wanted: Wanted | None, tempo: Tempo | None) -> None:
        self._wanted = wanted or Wanted()
        self.tempo = tempo or Tempo(
            inner_steps=self._wanted.inner_steps or _FIRST_INNER_STEPS,
            blocking=self._wanted.blocking,
            asynchronous=self._wanted.asynchronous,
            codec=self._wanted.codec,
            rate=self._wanted.rate,
            reason="as configured" if self._wanted.inner_steps else "to begin with: nothing is measured yet",
        )
        self.momentum = self._wanted.momentum
        self._news: Tempo | None = None
        self._readings: list[Reading] = []
        self._ceiling: int | None = None
        """Set by the guard: H stays below."""

    def take_news(self) -> Tempo | None:
        """What islands have to be told; None: nothing."""
        news, self._news = self._news, None
        return news

    def measured(self, beats: Mapping[str, Beat], tell: Callable[[Event], None]) -> None:
        """Islands say how they are."""
        now = self.tempo
        found = None if self._wanted.inner_steps or now.blocking else slowest_exchange(beats)
        steps, reason = now.inner_steps, now.reason
        if found is not None:
            wanted = found[0] if self._ceiling is None else min(found[0], self._ceiling)
            if wanted > _SLOWER * steps or wanted < _FASTER * steps:
                steps, reason = wanted, found[1]
        shares = shares_for(beats)
        if shares and _far_apart(dict(now.shares), dict(shares)):
            self._change(msgspec.structs.replace(now, inner_steps=steps, shares=shares, reason=reason), tell)
        elif steps != now.inner_steps:
            self._change(msgspec.structs.replace(now, inner_steps=steps, reason=reason), tell)

    def read(self, island: str, reading: Reading, tell: Callable[[Event], None]) -> None:
        """An island has seen what an arrival did to its loss."""
        values = (reading.before, reading.after, reading.noise)
        if not all(map(math.isfinite, values)) or reading.noise < 0:
            return
        self._readings.append(reading)
        action = self._guard()
        before, after, noise = values
        tell(Guarded(island=island, before=before, after=after, noise=noise, action=action))
        if action and self._news is not None:
            tell(_told(self._news))

    def _guard(self) -> str:
        """What is to be done about the last readings, and do it; empty: nothing."""
        if len(self._readings) < _READINGS:
            return ""
        recent, self._readings = self._readings, []
        rise = sum(each.after - each.before for each in recent) / len(recent)
        noise = math.sqrt(sum(each.noise**2 for each in recent)) / len(recent)
        if rise <= _BEYOND_NOISE * noise:
            return ""
        now = self.tempo
        seen = f"merging raised the loss by {rise:.3g}, {rise / noise if noise else math.inf:.3g} standard errors"
        if now.inner_steps > LEAST_INNER_STEPS:
            steps = max(LEAST_INNER_STEPS, now.inner_steps // 2)
            self._ceiling = steps
            action = f"{seen}: H is halved to {steps}"
            self._set(msgspec.structs.replace(now, inner_steps=steps, reason=action))
        elif now.rate > _LEAST_RATE:
            action = f"{seen}: the outer learning rate is halved to {now.rate / 2:g}"
            self._set(msgspec.structs.replace(now, rate=now.rate / 2, reason=action))
        else:
            action = f'{seen}: islands do not suit this training; use exact synchronisation, mode="exact"'
            self._set(msgspec.structs.replace(now, reason=action))
        return action

    def _change(self, tempo: Tempo, tell: Callable[[Event], None]) -> None:
        self._set(tempo)
        tell(_told(tempo))

    def _set(self, tempo: Tempo) -> None:
        self.tempo = self._news = tempo


def _told(tempo: Tempo) -> Retuned:
    return Retuned(
        inner_steps=tempo.inner_steps,
        codec=tempo.codec,
        blocking=tempo.blocking,
        shares=dict(tempo.shares),
        reason=tempo.reason,
    )


def _far_apart(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    if set(before) != set(after):
        return True
    return any(abs(after[name] - before[name]) > _SHARE_MOVES * before[name] for name in after)
