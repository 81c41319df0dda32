"""Whether the pace could be kept, in numbers.

The one idea: a region that ended late is made good by starting the next one's schedule as much earlier, within limits;
what goes beyond the limits is lost, and a pace that loses more than 1 % says so instead of passing for a device.
"""

import msgspec

_LARGEST_REPAYMENT = 0.1
"""The part of a region's time that may go into making good what earlier ones were late; at least 1 ms."""

_LARGEST_LOSS = 0.01
_MOST_OVERRUNS = 0.05


class PaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a pace asked for and what it took; times in seconds."""

    device: str
    honest: bool
    regions: int
    overruns: int
    """Regions whose real work alone took longer than the device would."""
    worst_overrun_s: float
    asked_s: float
    lost_s: float
    """Lateness that could not be made good: how much longer everything took than asked for."""
    paced_s_per_sample: float
    """Forward and backward, as asked for; 0 before the first one."""
    cpu_s_per_sample: float
    """CPU time of the same, of the thread that ran it; times spent in the hooks included."""
    busy_s_per_sample: float
    """Wall time of the same without sleep: above the CPU time where the cores are shared."""

    @property
    def line(self) -> str:
        """One line for people."""
        took = (
            f"a sample takes {1e3 * self.cpu_s_per_sample:.2f} ms of CPU time "
            f"({1e3 * self.busy_s_per_sample:.2f} ms busy), paced to {1e3 * self.paced_s_per_sample:.2f} ms"
        )
        late = (
            f"{self.overruns} of {self.regions} regions overran, by up to {1e3 * self.worst_overrun_s:.1f} ms; "
            f"{100 * self.lost_s / self.asked_s if self.asked_s else 0:.2f} % longer than asked for"
        )
        if self.honest:
            return f"{self.device}: {took}; {late}."
        return f"{self.device} could not keep its pace: {took}; {late}. Raise sample_ms, or run less on these cores."


class Account:
    """Adds up regions, and what lateness is still to be made good."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._late_s = 0.0
        self._regions = self._overruns = self._samples = 0
        self._worst_s = self._asked_s = self._lost_s = 0.0
        self._sample_asked_s = self._sample_cpu_s = self._sample_busy_s = 0.0

    def repay(self, duration_s: float) -> float:
        """Return how much earlier than now a region of `duration_s` starts on schedule, to make lateness good."""
        repaid_s = min(self._late_s, max(1e-3, _LARGEST_REPAYMENT * duration_s), duration_s)
        self._lost_s += self._late_s - repaid_s
        self._late_s = 0.0
        return repaid_s

    def add(self, *, asked_s: float, busy_s: float, late_s: float, slept_s: float, cpu_s: float, samples: int) -> None:
        """Enter one region.

        Args:
            asked_s: what it should take.
            busy_s: from its begin to the end of its real work, sleep of its hooks included.
            late_s: how long after its scheduled end it was done.
            slept_s: what its hooks slept.
            cpu_s: CPU time.
            samples: forward and backward of so many; 0: other work.
        """
        self._regions += 1
        self._asked_s += asked_s
        self._late_s = late_s
        overrun_s = busy_s - asked_s
        if overrun_s > max(5e-4, 0.02 * asked_s):
            self._overruns += 1
            self._worst_s = max(self._worst_s, overrun_s)
        if samples:
            self._samples += samples
            self._sample_asked_s += asked_s
            self._sample_cpu_s += cpu_s
            self._sample_busy_s += busy_s - slept_s

    @property
    def honest(self) -> bool:
        """Whether at most 1 % was lost and at most one region in 20 overran."""
        return self._lost_s <= _LARGEST_LOSS * self._asked_s and self._overruns <= _MOST_OVERRUNS * self._regions

    def report(self) -> PaceReport:
        """Return the sums so far."""
        samples = max(1, self._samples)
        return PaceReport(
            device=self._device,
            honest=self.honest,
            regions=self._regions,
            overruns=self._overruns,
            worst_overrun_s=self._worst_s,
            asked_s=self._asked_s,
            lost_s=self._lost_s,
            paced_s_per_sample=self._sample_asked_s / samples,
            cpu_s_per_sample=self._sample_cpu_s / samples,
            busy_s_per_sample=self._sample_busy_s / samples,
        )
