"""A number over the steps of a run of any length, in at most a few thousand points.

The one idea: a point is the mean of `stride` steps, and whenever there are too many, neighbours become one point and
the stride doubles, so nothing that was drawn is thrown away and memory has an end.
"""

from collections.abc import Iterable

MOST_POINTS = 2000


class Curve:
    """Points (step, mean value up to and with it); steps whose value is None are in none of them."""

    __slots__ = ("_count", "_last", "_total", "most", "steps", "stride", "values")

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.most = most
        self.stride = 1
        """Steps in a point."""
        self.steps: list[int] = []
        self.values: list[float] = []
        self._total, self._count, self._last = 0.0, 0, 0

    def extend(self, points: Iterable[tuple[int, float | None]]) -> None:
        """Add steps, in order, with their values."""
        steps, values, stride = self.steps, self.values, self.stride
        total, count, last = self._total, self._count, self._last
        for step, value in points:
            if value is None:
                continue
            total += value
            count += 1
            last = step
            if count == stride:
                steps.append(step)
                values.append(total / count)
                total, count = 0.0, 0
                if len(steps) == self.most:
                    self._halve()
                    steps, values, stride = self.steps, self.values, self.stride
        self._total, self._count, self._last = total, count, last

    def drawn(self, newest: Iterable[tuple[int, float | None]] = ()) -> tuple[list[int], list[float]]:
        """Return steps and values, with `newest` behind them and with the steps that make no whole point yet."""
        curve = Curve(self.most)
        curve.stride, curve.steps, curve.values = self.stride, self.steps.copy(), self.values.copy()
        curve._total, curve._count, curve._last = self._total, self._count, self._last
        curve.extend(newest)
        if curve._count:
            curve.steps.append(curve._last)
            curve.values.append(curve._total / curve._count)
        return curve.steps, curve.values

    def rewind(self, step: int) -> None:
        """Forget what came after `step`."""
        if self._last <= step:
            return
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()
        self._total, self._count, self._last = 0.0, 0, step

    def _halve(self) -> None:
        pairs = zip(self.values[::2], self.values[1::2])
        self.steps, self.values = self.steps[1::2], [(first + second) / 2 for first, second in pairs]
        self.stride *= 2
