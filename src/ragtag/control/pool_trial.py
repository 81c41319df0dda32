"""Whether pulling work pays here, found out by doing it for some steps and not doing it for as many.

The one idea: what a pool saves can be predicted from noise, what it costs cannot: more and smaller micro-batches,
whose fixed costs depend on model and device. So a predicted gain earns a trial, and the clock decides.
"""

import msgspec

from ragtag.control.robust import median

STEPS = 12
"""Steps with and then without pulling that are compared: by 12, medians of steps that vary by 8 % differ by 4 %."""
_DOUBT = 1.03
"""By how much slower it must look to be given up: 12 steps are few, and a gain was predicted from many more."""
_FIRST_WAIT = 100
"""Steps until the next trial after one in vain; doubles each time."""


class PoolTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Fed every step, alike on every rank; says whether the next one pulls."""

    pulls: bool = False
    """Whether the next step has a pool."""
    kept: bool = False
    """The trial is over, and pulling was faster."""
    pulled_s: tuple[float, ...] = ()
    """Times of steps with a pool in this trial."""
    plain_s: tuple[float, ...] = ()
    """Times of the steps without one that followed them."""
    next_step: int = 0
    """No trial begins before this step."""
    wait: int = _FIRST_WAIT
    verdict: str = ""
    """One line that says how the newest trial ended."""

    @property
    def under_way(self) -> bool:
        """Whether a trial has begun, or ended with a yes."""
        return self.pulls or bool(self.pulled_s)

    def observe(self, *, step: int, wall_s: float, pulled: bool, wanted: bool) -> "PoolTrial":
        """Return the trial after `step`, which took `wall_s` seconds and had a pool or not (`pulled`).

        Where no pool is predicted to pay any more (`wanted`), it ends, and a later wish begins a new one.
        """
        if not wanted:
            return PoolTrial(next_step=self.next_step, wait=self.wait, verdict=self.verdict)
        if self.kept:
            return self
        if step < self.next_step:
            return msgspec.structs.replace(self, pulls=False)
        pulled_s, plain_s = self.pulled_s, self.plain_s
        if pulled and len(pulled_s) < STEPS:
            pulled_s = (*pulled_s, wall_s)
        elif not pulled and len(pulled_s) == STEPS:
            plain_s = (*plain_s, wall_s)
        if len(plain_s) < STEPS:
            return msgspec.structs.replace(self, pulls=len(pulled_s) < STEPS, pulled_s=pulled_s, plain_s=plain_s)
        with_s, without_s = median(pulled_s), median(plain_s)
        times = f"{with_s:.3g} s a step with it, {without_s:.3g} s without"
        if with_s < _DOUBT * without_s:
            return PoolTrial(
                pulls=True,
                kept=True,
                next_step=self.next_step,
                wait=self.wait,
                verdict=f"pulling work is kept: {times}",
            )
        again = step + self.wait
        return PoolTrial(
            next_step=again,
            wait=2 * self.wait,
            verdict=f"pulling work does not pay: {times}; tried again from step {again} on",
        )
