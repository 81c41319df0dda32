"""Lines that several workers say alike are shown once, with the numbers of all of them.

The one idea: a line waits for a moment, in which others may say the same; so what all ranks warn of is one line on the
terminal, in the place of the first.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import BinaryIO

_WAITS_S = 0.2
_MOST_WAITING = 500


class Folding:
    """Call `say` from any thread, and `show` now and then, and `show(everything=True)` at the end.

    Args:
        kind: what the numbers count: "rank", "worker".
        write: shows bytes on a stream.
        clock: seconds, from anywhere.
    """

    def __init__(
        self, kind: str, write: Callable[[BinaryIO, bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kind, self._write, self._clock = kind, write, clock
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, BinaryIO, bytes, list[int]]] = []

    def say(self, number: int, line: bytes, shown: BinaryIO) -> None:
        """Worker `number` has written `line`, which ends with a line's end, to what is shown on `shown`."""
        with self._lock:
            for _, stream, text, numbers in self._waiting:
                if stream is shown and text == line and number not in numbers:
                    numbers.append(number)
                    return
            self._waiting.append((self._clock() + _WAITS_S, shown, line, [number]))
            if len(self._waiting) > _MOST_WAITING:
                self._show(self._waiting[0][0])

    def show(self, *, everything: bool = False) -> None:
        """Show the lines that have waited long enough."""
        if self._waiting:
            with self._lock:
                self._show(float("inf") if everything else self._clock())

    def _show(self, until_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= until_s:
            _, stream, text, numbers = self._waiting.pop(0)
            self._write(stream, f"[{names(self._kind, numbers)}] ".encode() + text)


def names(kind: str, numbers: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{first}-{last}" if first < last else str(first) for first, last in runs]
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{kind}{'' if single else 's'} {', '.join(parts)}"
