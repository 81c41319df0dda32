"""What adding gradients up costs this rank's processor, told from what a step's reductions took.

The one idea: only processor time says what a rank did itself, since most of a reduction is waiting for others; and how
long a second of it takes here (more than one under a quota, or beside other programs) is told by the ring's own thread
while it does not wait.
"""

from collections.abc import Iterable, Sequence

from ragtag.comm.ring import RingTime
from ragtag.control.chunks import parts_of

_KEEP = 0.95
"""What is left of older steps' sums after each: quotas come in bursts, so that one step says little."""


class RingCost:
    """Follows the cost of a whole gradient. It is of this rank alone; ballots carry it to the others."""

    def __init__(self) -> None:
        self.add_s = 0.0
        """Seconds that adding a whole gradient to another takes."""
        self.send_s = 0.0
        """Seconds that sending as much as a gradient takes, or receiving it."""
        self._busy_s = self._cpu_s = self._travel_s = self._travels = self._add_s = self._adds = 0.0

    def observe(
        self, times: Iterable[RingTime], weights: Sequence[int], rank: int, *, waited_s: float, cpu_s: float
    ) -> None:
        """Take in one reduction of all gradients.

        Args:
            times: of each bucket.
            weights: chunk weights by rank.
            rank: this one.
            waited_s: how long the training thread waited for the sum.
            cpu_s: processor time of all other threads meanwhile. What they did before that was no loss of time.
        """
        adds, travels = parts_of(weights, rank)
        add_s = busy_s = own_cpu_s = 0.0
        for time in times:
            add_s += time.add_cpu_s
            busy_s += time.busy_s
            own_cpu_s += time.cpu_s
        self._busy_s = _KEEP * self._busy_s + busy_s
        self._cpu_s = _KEEP * self._cpu_s + own_cpu_s
        stretch = max(1.0, self._busy_s / self._cpu_s) if self._cpu_s > 0 else 1.0
        # A rank was not busier than it waited, however long its seconds.
        exposed_s = min(stretch * cpu_s, waited_s)
        self._add_s = _KEEP * self._add_s + min(stretch * add_s, exposed_s)
        self._adds = _KEEP * self._adds + adds
        self._travel_s = _KEEP * self._travel_s + max(0.0, exposed_s - stretch * add_s)
        self._travels = _KEEP * self._travels + travels
        self.add_s = self._add_s / self._adds if self._adds > 0 else 0.0
        self.send_s = self._travel_s / self._travels
