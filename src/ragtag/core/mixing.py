"""Integer mixing: every seed and every sample hash in ragtag comes from here, so that they are the same on any machine.

The one idea: random numbers are not drawn, they are looked up. A number that depends only on (seed, step, unit) does
not care which rank asks for it, or when, or how often.
"""

MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Return the SplitMix64 output function of `value` modulo 2**64: a bijection on [0, 2**64) that mixes all bits.

    Constants: Stafford's variant 13 as used by Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators" (OOPSLA 2014).
    """
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def _absorb(parts: tuple[int, ...]) -> int:
    # The count goes in first: (1,) and (1, 0) must not collide.
    state = mix64(_GOLDEN_GAMMA * (len(parts) + 1))
    for part in parts:
        state = mix64((state ^ (part & MASK64)) + _GOLDEN_GAMMA)
    return state


def seed_for(*parts: int) -> int:
    """Return a seed in [0, 2**63) that depends on all `parts` and their order; parts count modulo 2**64."""
    return _absorb(parts) >> 1


def sample_hash(*parts: int) -> int:
    """Return a hash in [0, 2**32) of `parts`, for sums that tell which samples they hold; parts count modulo 2**64."""
    return _absorb(parts) >> 32
