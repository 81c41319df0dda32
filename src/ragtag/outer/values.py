"""The hub's values of one fragment of the model, and what a merge makes of them.

The one idea: a merge is one weighted mean, added up as contributions come, so that the hub holds no more than values,
momentum and one sum. What a merge changes is rounded as it travels *before* it is applied here: hub and islands then
hold the same bits, whoever fetches them by whatever way.
"""

import math
import statistics
from collections import deque

import torch

from ragtag.outer.codec import WorthlessDelta, decode, encode
from ragtag.outer.protocol import Codec

_ABSURD = 100.0
_REMEMBERED = 32
_LEAST_REMEMBERED = 3
OLDEST = 2
"""Rounds that a contribution may be late."""


class FragmentValues:
    """Values, momentum, and the sum of a merge under way.

    Args:
        values: 1-d fp32, in host memory.
        momentum: of the same size; None: zeros.
        version: of `values`.
    """

    def __init__(self, values: torch.Tensor, momentum: torch.Tensor | None = None, version: int = 1) -> None:
        self.values, self.version = values, version
        self.momentum = torch.zeros_like(values) if momentum is None else momentum
        self._sum: torch.Tensor | None = None
        self._weight = self._steps = 0.0
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)

    def add(
        self,
        delta: torch.Tensor,
        *,
        tokens: float,
        steps: int,
        base: int,
        pinned: int = 0,
        oldest: int = OLDEST,
    ) -> float:
        """Take a contribution into the merge under way; return its weight before weights are made to add up to 1.

        tokens * (1/2)^age, where age is how many versions its base is behind. Where islands have data of their own, the
        size of that data takes the place of tokens, and FedNova that of the mean: the sum of p_i Delta_i / tau_i times
        that of p_i tau_i, so neither speed nor number of steps decides whose data counts (Wang et al., "Tackling the
        Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020, eq. 6).

        Args:
            delta: 1-d fp32.
            steps: tau, of the inner optimizer.
            base: version that it is a difference to.
            pinned: samples of the island's own data; 0: all islands draw from the same.
            oldest: largest age that is taken.

        Raises:
            WorthlessDelta: it is not finite, of an absurd norm, without tokens, or too old; the sum is as before.
        """
        age = self.version - base
        if not 0 <= age <= oldest:
            raise WorthlessDelta(
                f"it is from version {base}, and this is version {self.version}: older than {oldest} rounds"
                if age > 0
                else f"it is from version {base}, which there is not yet"
            )
        if not (math.isfinite(tokens) and tokens > 0 and steps > 0):
            raise WorthlessDelta(f"it counts {tokens:g} tokens in {steps} steps")
        norm = float(torch.linalg.vector_norm(delta))
        if not math.isfinite(norm):
            raise WorthlessDelta("it holds numbers that are not finite")
        usual = statistics.median(self._norms) if len(self._norms) >= _LEAST_REMEMBERED else 0.0
        if usual and norm > _ABSURD * usual:
            raise WorthlessDelta(f"its norm {norm:.3g} is absurd: {norm / usual:.3g} times the usual {usual:.3g}")
        if norm:
            self._norms.append(norm)
        weight = (pinned or tokens) * 0.5**age
        if self._sum is None:
            self._sum = torch.zeros_like(self.values)
        self._sum.add_(delta, alpha=weight / steps if pinned else weight)
        self._weight += weight
        self._steps += weight * steps if pinned else 0.0
        return weight

    def close(
        self, *, rate: float, momentum: float, codec: Codec, spare: torch.Tensor | None = None
    ) -> tuple[memoryview, float]:
        """Merge what was added, and return what it changed, as it travels, and its norm.

        m = momentum * m + Delta; values -= rate * (Delta + momentum * m): Nesterov's momentum as the outer optimizer
        (Douillard et al., "DiLoCo", 2023, arXiv 2311.08105, section 2).

        Args:
            spare: memory that may be written over; see `decode`.
        """
        assert self._sum is not None, "nothing was added"
        delta = self._sum.div_(self._weight)
        if self._steps:
            delta.mul_(self._steps / self._weight)
        self.momentum.mul_(momentum).add_(delta)
        change = delta.add_(self.momentum, alpha=momentum).mul_(-rate)
        data = encode(codec, change)
        self._sum, self._weight, self._steps = None, 0.0, 0.0
        change = decode(codec, data, self.values.numel(), out=spare)
        self.values += change
        self.version += 1
        return data, float(torch.linalg.vector_norm(change))
