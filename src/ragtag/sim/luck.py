"""Random slowdowns of many devices in many steps at once, the very ones that emulation meets.

The one idea: `emulate.schedule` looks its luck up by (seed, device name, step, micro-batch) with integer mixing, and
the same mixing works on whole arrays. numpy, because 4,096 devices times an hour of steps are 10 million numbers, which
take minutes one by one.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TABLE = 4096
_LOGIT_REACH = 37.0
"""Beyond the logit of the least number of 53 bits."""


def hashed_names(names: Sequence[str]) -> NDArray[np.uint64]:
    """Return a number for each device name, as emulation has it."""
    return np.array(
        [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") for name in names], dtype=np.uint64
    )


def slowdowns(
    seed: int,
    names: NDArray[np.uint64],
    steps: NDArray[np.uint64],
    jitter: NDArray[np.float64],
    micro_batch: int | None = None,
) -> NDArray[np.float64]:
    """Return exp(jitter * gauss) for each of `steps` (rows) and devices (columns): log-normal with median 1.

    Args:
        seed: of the cluster's emulation.
        names: what `hashed_names` returned.
        steps: step numbers.
        jitter: sigma by device.
        micro_batch: None: one draw a step.
    """
    if not jitter.any():
        return np.ones((len(steps), len(names)))
    parts = 3 if micro_batch is None else 4
    with np.errstate(over="ignore"):
        state = _mix(np.array([_GOLDEN_GAMMA * np.uint64(parts + 1)]))
        state = _absorb(state, np.array([seed % 2**64], dtype=np.uint64))
        state = _absorb(_absorb(state, names)[None, :], steps.astype(np.uint64)[:, None])
        if micro_batch is not None:
            state = _absorb(state, np.array([micro_batch], dtype=np.uint64))
    # 52 bits and a half, as emulation does.
    uniform = ((state >> np.uint64(12)) + 0.5) / 2.0**52
    return np.exp(jitter * _gauss(np.asarray(uniform, dtype=np.float64)))


def _absorb(state: NDArray[np.uint64], part: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return _mix((state ^ part) + _GOLDEN_GAMMA)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`core.mixing.mix64` on arrays; unsigned numbers wrap around."""
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


def _gauss(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of the normal distribution, from a table over logits, in which it is nearly straight (to 1e-5)."""
    logits, values = _table()
    return np.interp(np.log(uniform) - np.log1p(-uniform), logits, values)


@lru_cache(maxsize=1)
def _table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    logits = np.linspace(-_LOGIT_REACH, 0.0, _TABLE)
    # The lower half and its mirror image: near 1 a float has too few digits.
    lower = np.array([NormalDist().inv_cdf(p) for p in np.exp(logits) / (1 + np.exp(logits))])
    return np.concatenate([logits, -logits[-2::-1]]), np.concatenate([lower, -lower[-2::-1]])
