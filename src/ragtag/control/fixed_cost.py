"""What part of a rank's compute time does not shrink with its share, told from how the time changed when the share did.

The one idea: only the jump of a share at a change of plan is evidence. Between changes speed and share move together
(a rank that slows down is given less, so its time stays the same), and a regression over all steps would take that for
a fixed cost.
"""

import msgspec

_DOUBT = 0.02
"""Relative error of a block's mean time that no number of steps removes: devices drift."""

_PRIOR = 1.0
"""Prior standard deviation of a fixed cost, in shares: half of a rank's time may well be fixed."""

_KEEP = 0.7
"""What is left of old evidence when new evidence comes."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps with the same share: samples, micro-batches, their mean seconds, and how many steps."""

    samples: int
    micro_batches: int
    seconds: float
    steps: int


class FixedCost(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed cost of a step and of a micro-batch, in samples that could be computed in that time, and the evidence.

    A rank's time for n samples in k micro-batches is level * (per_step + per_forward * k + n). Two blocks 0 and 1 at
    the same level give one equation, linear in both costs: per_step * (y0 - y1) + per_forward * (y0 k1 - y1 k0)
    = y1 n0 - y0 n1. Solved by least squares with a prior at zero. In this form, blocks that differ by noise or by
    drift push the costs to zero, where shares are proportional to speed: slower to converge, never unstable.
    """

    per_step: float = 0.0
    per_forward: float = 0.0
    sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Weighted sums of uu, uw, ww, uv, wv, with u, w, v the three terms of the equation."""

    def size(self, samples: int, micro_batches: int) -> float:
        """Return the work of `samples` in `micro_batches` forwards, in samples; 0 for none."""
        return self.per_step + self.per_forward * micro_batches + samples if samples else 0.0

    def learn(self, before: Block, after: Block, noise: float) -> "FixedCost":
        """Return the costs after a change of share, `noise` being the relative standard deviation of one step."""
        if 10 * abs(before.samples - after.samples) < max(before.samples, after.samples):
            return self
        mean = (before.seconds + after.seconds) / 2
        y0, y1 = before.seconds / mean, after.seconds / mean
        u = y0 - y1
        w = y0 * after.micro_batches - y1 * before.micro_batches
        v = y1 * before.samples - y0 * after.samples
        share = (before.samples + after.samples) / 2
        size = self.size(before.samples, before.micro_batches) + self.size(after.samples, after.micro_batches)
        error = noise * noise * (1 / before.steps + 1 / after.steps) + _DOUBT * _DOUBT
        weight = 4 / (size * size * error)
        uu, uw, ww, uv, wv = (
            _KEEP * old + weight * new for old, new in zip(self.sums, (u * u, u * w, w * w, u * v, w * v))
        )
        forwards = (before.micro_batches + after.micro_batches) / 2
        step_prior = 1 / (_PRIOR * _PRIOR * share * share)
        # A forward's own cost is given half the room of a step's: with one forward a step the two are the same thing.
        forward_prior = 4 * forwards * forwards * step_prior
        per_step, per_forward = _solve(uu + step_prior, uw, ww + forward_prior, uv, wv)
        limit = 9 * share
        return FixedCost(
            per_step=min(per_step, limit),
            per_forward=min(per_forward, limit / forwards),
            sums=(uu, uw, ww, uv, wv),
        )


def _solve(uu: float, uw: float, ww: float, uv: float, wv: float) -> tuple[float, float]:
    """Solve the 2 x 2 normal equations for two costs of at least zero."""
    determinant = uu * ww - uw * uw
    if determinant > 0:
        first, second = (uv * ww - wv * uw) / determinant, (wv * uu - uv * uw) / determinant
        if first >= 0 and second >= 0:
            return first, second
    alone = max(uv / uu, 0.0), max(wv / ww, 0.0)
    # With one of them at zero, keep the one that explains more.
    return (alone[0], 0.0) if uv * alone[0] >= wv * alone[1] else (0.0, alone[1])
