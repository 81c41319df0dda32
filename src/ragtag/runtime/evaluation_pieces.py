"""What one forward of an evaluation may hold on this rank, learnt by running out of memory.

The one idea: sums of losses add up over any pieces, so what does not fit is read again and computed in halves, and the
value stays. The run remembers how much fitted, so that each size is tried in vain once.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragtag.control.explain import samples
from ragtag.core.errors import DeviceMemoryError
from ragtag.runtime.out_of_memory import ran_out_of_memory

log = logging.getLogger("ragtag")

Release = Callable[[], None]
Piece = tuple[int, int]
"""Samples from the first up to, and without, the second."""


class EvaluationPieces:
    """Cuts an evaluation into pieces that this rank's memory holds; one for all evaluations of a run."""

    def __init__(self) -> None:
        self.most: int | None = None
        """Samples in one forward that may fit; None: any number has."""
        self._failure = ""

    def of(self, piece: Piece) -> list[Piece]:
        """Return `piece`, cut where it is known to be too large."""
        start, stop = piece
        most = self.most or stop - start
        return [(each, min(each + most, stop)) for each in range(start, stop, most)]

    def compute(
        self, piece: Piece, forward: Callable[[Piece], None], forget: Callable[[], None], where: str, release: Release
    ) -> None:
        """Call `forward` with all of `piece`, in as many parts as it takes.

        Args:
            forward: computes one part and adds it up, or runs out of memory.
            forget: what was asked for ahead, in larger parts, is not needed.
            where: rank, host and device, for messages.
            release: gives back what nobody refers to any more.

        Raises:
            DeviceMemoryError: one sample does not fit.
        """
        left = deque(self.of(piece))
        while left:
            part = left.popleft()
            with self._surviving():
                forward(part)
            if self._failure:  # the error is gone, and with it its frames and what they held
                release()
                self._halve(part[1] - part[0], where)
                forget()
                left = deque(each for larger in (part, *left) for each in self.of(larger))

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        self._failure = ""
        try:
            yield
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            self._failure = (str(error).strip() or type(error).__name__).splitlines()[0][:300]

    def _halve(self, tried: int, where: str) -> None:
        if tried == 1:
            raise DeviceMemoryError(
                f"{where} ran out of memory: one sample, which is evaluated in one forward, did not fit. Make samples "
                f"shorter, use precision='bf16', or start without this device. What it said: {self._failure}"
            )
        self.most = tried // 2
        log.warning(
            "%s ran out of memory while evaluating %s in one forward (%s); trying %d",
            where,
            samples(tried),
            self._failure,
            self.most,
        )
