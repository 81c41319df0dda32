"""When, within forward and backward, each gradient becomes ready: learned once from CPU time.

The one idea: a slower device does the same work in the same order, so an event that comes after 60 % of the real CPU
time comes after 60 % of the emulated time, whatever the wall clock said meanwhile.
"""

from collections.abc import Sequence
from statistics import median

Event = tuple[int, int]
"""(number of the parameter, how often it has come in this region before), or (`FORWARD`, same) for the forward's
end. A gradient arrives more than once under re-entrant recomputation."""

FORWARD = -1

_REGIONS = 5
"""Regions to learn from: the first is slow for reasons of its own, and the median of five forgets it."""

_FORWARD_PART = 1 / 3
"""Until measured: backward costs about twice the forward (Kaplan et al. 2020, "Scaling Laws for Neural Language
Models", section 2.1)."""


class Readiness:
    """Fractions of a region's time, by event.

    Args:
        num_parameters: how many gradients are expected, for the guess before anything is known.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._recorded: list[dict[Event, float]] = []
        self._fractions: dict[Event, float] = {}

    @property
    def learning(self) -> bool:
        """Whether `record` is wanted still."""
        return len(self._recorded) < _REGIONS

    @property
    def forward(self) -> float:
        """The part of a region's time that forward takes."""
        return self._fractions.get((FORWARD, 0), _FORWARD_PART)

    def fraction(self, event: Event, gradients_before: int) -> float:
        """Return the part of the region's time after which `event` comes; a guess if it was never recorded.

        Args:
            event: which one.
            gradients_before: how many gradients came in this region before it.
        """
        known = self._fractions.get(event)
        if known is not None:
            return known
        if event[0] == FORWARD:
            return _FORWARD_PART if event[1] == 0 else 0.0
        if self._fractions:
            return 0.0  # a newcomer among known ones: the next known one brings it back to the schedule
        return min(1.0, self.forward + (1 - self.forward) * (gradients_before + 1) / self._num_parameters)

    def record(self, marks: Sequence[tuple[Event, float]]) -> None:
        """Learn from one region: its events in order, with the CPU seconds spent from its start to each."""
        total_s = marks[-1][1]
        if total_s <= 0:
            return
        self._recorded.append({event: cpu_s / total_s for event, cpu_s in marks})
        events = {event for fractions in self._recorded for event in fractions}
        self._fractions = {
            event: median(fractions[event] for fractions in self._recorded if event in fractions) for event in events
        }
