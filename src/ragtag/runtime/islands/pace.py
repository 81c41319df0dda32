"""When an island sends which fragment: pure arithmetic over step numbers.

The one idea: every fragment goes every H steps, and fragments are H / P steps apart, so the link is used evenly.
Whoever hears that another island has sent a fragment from the same version sends its own as soon as it has done half
of its steps. So islands at slightly different speeds stay together without waiting, and of two that are out of phase,
by however much, one is always more than half way when it hears of the other: they come together within a round.
"""

import math
from collections.abc import Mapping

EARLIEST = 0.5
"""Part of H after which an island sends because another one has. More, and some phases would never come together."""


class Pace:
    """By fragment, after which steps it was sent.

    Args:
        num_fragments: P.
        begun: steps that were done when islands began to train side by side.
        inner_steps: H.
    """

    def __init__(self, num_fragments: int, begun: int, inner_steps: int) -> None:
        # As if each had been sent at its own place in the period that ends now.
        self._sent = [begun + inner_steps * (p + 1) // num_fragments - inner_steps for p in range(num_fragments)]
        self._least = begun

    def due(
        self, committed: int, inner_steps: int, *, opened: Mapping[int, int], versions: Mapping[int, int]
    ) -> list[int]:
        """Fragments to be sent after step `committed`, the longest due first.

        Args:
            opened: by fragment, from which version another island has sent one that is not merged yet.
            versions: by fragment, which version this island has.
        """
        waiting: list[tuple[int, int]] = []
        for fragment, sent in enumerate(self._sent):
            done = committed - sent
            early = fragment in opened and opened[fragment] == versions.get(fragment)
            if committed > self._least and done >= (math.ceil(EARLIEST * inner_steps) if early else inner_steps):
                waiting.append((-done, fragment))
        return [fragment for _, fragment in sorted(waiting)]

    def sent(self, fragment: int, committed: int) -> None:
        """A fragment was sent after step `committed`."""
        self._sent[fragment] = committed
