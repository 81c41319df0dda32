"""Steps of devices of which some are slowed down, as the votes would tell of them: for tests of who is blamed.

The one idea: everything by rank is drawn from one seeded generator, and what slows a rank down is a function of the
step; so a run of ten thousand steps is a loop, and it is the same on every machine.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragtag.control.blame import Blame, Finding
from ragtag.control.blame_seen import Seen

SHARE, SAMPLE_S = 8, 0.005
READ_S, APPLY_S, COMM_S, ODD_S = 0.3e-3, 2e-3, 3e-3, 20e-3


@dataclass(frozen=True, kw_only=True)
class Slow:
    """What happens to one rank from step `since` on, up to `until`."""

    rank: int
    since: int = 1
    until: int = 1 << 40
    factor: float = 1.0
    """Of its computing time."""
    read_s: float = 0.0
    """A sample."""
    host_s: float = 0.0
    """Of waiting for a processor, which its computing takes longer by."""
    receives_s: float = 0.0
    """Of waiting for a processor, by what receives from others, which keeps messages under way."""
    link_s: float = 0.0
    """Of messages under way, on the links between its host and others."""
    redo_s: float = 0.0
    """In the first step."""
    runs_out: bool = False
    """In the first step; from the next one on it computes one sample at a time."""
    faults: int = 0

    def at(self, step: int) -> bool:
        return self.since <= step < self.until


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Ranks, each on a host of its own unless `hosts` says where."""

    shares: Sequence[int] | Callable[[int], Sequence[int]] = (SHARE,) * 4
    sample_s: Sequence[float] = ()
    """By rank; SAMPLE_S where empty."""
    jitter: float = 0.02
    """Standard deviation of the logarithm of computing times."""
    small: float = 0.1e-3
    """Mean of what comes on top of everything else, exponential."""
    slow: Sequence[Slow] = ()
    hosts: Sequence[str] = ()
    kinds: Sequence[str] = ()
    warms_up_s: float = 0.0
    """Most of what the first step takes longer, for each rank another part of it."""
    forward_s: float = 0.0
    """Cost of a forward, whatever its size."""
    odd: float = 0.0
    """How likely it is that one of a rank's numbers is odd in a step: ODD_S longer, on average."""
    common: float = 0.0
    """Standard deviation of the logarithm of what all ranks' computing takes longer in a step."""
    seed: int = 0
    luck: random.Random = field(default_factory=random.Random, repr=False)

    def __post_init__(self) -> None:
        self.luck.seed(self.seed)

    @property
    def world_size(self) -> int:
        return len(self._shares(1))

    def _shares(self, step: int) -> Sequence[int]:
        return self.shares(step) if callable(self.shares) else self.shares

    def _place(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else str(rank % self.world_size)

    def blame(self) -> Blame:
        names = [f"dev{rank}" for rank in range(self.world_size)]
        hosts = self.hosts or [f"host{rank}" for rank in range(self.world_size)]
        return Blame(names, hosts, self.kinds or ["same"] * self.world_size)

    def step(self, number: int) -> Seen:
        ranks, luck = range(self.world_size), self.luck
        samples = tuple(self._shares(number))

        def small() -> float:
            seconds = luck.expovariate(1 / self.small) if self.small else 0.0
            return seconds + (luck.expovariate(1 / ODD_S) if luck.random() < self.odd else 0.0)

        compute, data, host, redo = [], [], [], []
        faults, ran_out, micro_batch = [], [], [max(samples)] * self.world_size
        link = [small() for _ in ranks]
        common = math.exp(luck.gauss(0, self.common))
        for rank in ranks:
            slows = [slow for slow in self.slow if slow.rank == rank and slow.at(number)]
            first = [slow for slow in slows if slow.since == number]
            if any(slow.runs_out and number > slow.since for slow in slows):
                micro_batch[rank] = 1
            forwards = -(-samples[rank] // micro_batch[rank])
            sample_s = self.sample_s[rank] if self.sample_s else SAMPLE_S
            seconds = (samples[rank] * sample_s + forwards * self.forward_s) * math.exp(luck.gauss(0, self.jitter))
            seconds *= common * math.prod(slow.factor for slow in slows)
            seconds += (self.warms_up_s * luck.random() if number == 1 else 0.0) + small()
            waits_s = sum(slow.host_s for slow in slows) + small()
            works = samples[rank] > 0
            compute.append((seconds + waits_s) * works)
            host.append(waits_s * works)
            data.append((samples[rank] * (READ_S + sum(slow.read_s for slow in slows)) + small()) * works)
            redo.append(sum(slow.redo_s for slow in first))
            faults.append(sum(slow.faults for slow in slows))
            ran_out.append(any(slow.runs_out for slow in first))
        for slow in self.slow:  # a vote tells of the links in the step before
            for each in ranks:
                if slow.at(number - 1) and (self._place(each) == self._place(slow.rank)) != (
                    self._place(each - 1) == self._place(slow.rank)
                ):
                    link[each] += slow.link_s
        receives_s = [sum(slow.receives_s for slow in self.slow if slow.rank == r and slow.at(number)) for r in ranks]
        for slow in self.slow:
            link[slow.rank] += slow.receives_s * slow.at(number - 1)
        on_links_s = sum(receives_s) + sum(slow.link_s for slow in self.slow if slow.at(number))
        comm_s = COMM_S + on_links_s + small()
        work = [sum(each) for each in zip(compute, data, redo)]
        return Seen(
            step=number,
            samples=samples,
            present=tuple(each > 0 for each in samples),
            forwards=tuple(-(-each // max(1, *samples)) for each in samples),
            fixed=((0.0, 0.0),) * self.world_size,
            compute_s=tuple(compute),
            data_s=tuple(data),
            apply_s=tuple(APPLY_S + small() for _ in ranks),
            comm_s=comm_s,
            wall_s=max(work) + APPLY_S + comm_s,
            redo_s=tuple(redo),
            host_s=tuple(host),
            link_host_s=tuple(small() + receives_s[rank] for rank in ranks),
            link_s=tuple(link),
            faults=tuple(faults),
            ran_out=tuple(ran_out),
            micro_batch=tuple(micro_batch),
        )

    def run(self, steps: int, blame: Blame | None = None, *, first: int = 1) -> list[Finding]:
        """Return all that is found in steps `first` to `steps`."""
        blame = blame or self.blame()
        return [found for number in range(first, steps + 1) for found in blame.observe(self.step(number))]


def begun(findings: Sequence[Finding]) -> list[tuple[int, str]]:
    """Rank and cause of those that begin."""
    return [(each.rank, each.cause) for each in findings if not each.over]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often blame is right, over many runs of `Devices`."""

    found: int
    """Runs in which the slowed rank and cause were named in time, and nothing else was."""
    runs: int
    steps: Sequence[int]
    """Of those found: in which of the slow steps, from 1."""


def detection(make: Callable[[int], Devices], runs: int, *, onset: int, within: int = 10) -> Rates:
    """Run `make(seed)`, whose only `Slow` begins at step `onset`, for each of `runs` seeds."""
    steps = []
    for seed in range(runs):
        devices = make(seed)
        findings = [each for each in devices.run(onset + within - 1) if not each.over]
        slow = devices.slow[0]
        if len(findings) == 1 and findings[0].rank == slow.rank and findings[0].step >= onset:
            steps.append(findings[0].step - onset + 1)
    return Rates(found=len(steps), runs=runs, steps=steps)


def false_alarms(make: Callable[[int], Devices], seeds: Sequence[int], steps: int) -> float:
    """Findings in 10,000 steps of `make(seed)`, in which nobody is to be blamed."""
    count = sum(len(begun(make(seed).run(steps))) for seed in seeds)
    return 1e4 * count / (steps * len(seeds))
