"""Unequal devices for tests of the controller: step times drawn from a + o k + b n, with speeds that follow a script.

The one idea: the same draws can be replayed under the controller, under fixed shares and under the best shares of the
moment, so that what a wrong share costs is a difference of two numbers.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragtag.control.controller import Controller
from ragtag.control.observation import Observation, forwards
from ragtag.control.proposal import Limits
from ragtag.control.sharing import initial_plan
from ragtag.core.values import Plan
from ragtag.plan.apportion import apportion_times

Speed = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Devices:
    speeds: Sequence[Speed]
    """Samples per 10 ms, a number or a function of the step."""
    fixed_s: Sequence[float] = ()
    forward_s: float = 0.0
    apply_s: Sequence[float] = ()
    comm_s: float = 0.0
    presence_s: Sequence[float] = ()
    jitter: float = 0.0
    """Standard deviation of the log of a device's slowdown in a step."""
    seed: int = 0
    odd: dict[tuple[int, int], float] = field(default_factory=dict)
    """Factors by (step, rank)."""

    def sample_s(self, rank: int, step: int) -> float:
        speed = self.speeds[rank]
        return 0.01 / (speed(step) if callable(speed) else speed)

    def factor(self, rank: int, step: int) -> float:
        draw = math.exp(self.jitter * random.Random(f"{self.seed} {step} {rank}").gauss(0, 1)) if self.jitter else 1.0
        return draw * self.odd.get((step, rank), 1.0)

    def compute_s(self, rank: int, step: int, samples: int, num_forwards: int = 1) -> float:
        if not samples:
            return 0.0
        fixed = self.fixed_s[rank] if self.fixed_s else 0.0
        work = fixed + self.forward_s * num_forwards + self.sample_s(rank, step) * samples
        return work * self.factor(rank, step)

    def step(self, step: int, plan: Plan) -> Observation:
        ranks = range(len(self.speeds))
        counts = [forwards(n, unit=plan.unit, micro_batch=m) for n, m in zip(plan.shares, plan.micro_batch)]
        compute = [self.compute_s(rank, step, plan.shares[rank], counts[rank]) for rank in ranks]
        apply = tuple(self.apply_s) or (0.0,) * len(ranks)
        comm = self.comm_s + sum(s for s, n in zip(self.presence_s, plan.shares) if n)
        return Observation(
            step=step,
            plan_id=plan.id,
            samples=plan.shares,
            micro_batches=tuple(counts),
            compute_s=tuple(compute),
            apply_s=apply,
            comm_s=comm,
            wall_s=max(a + c for a, c in zip(apply, compute)) + comm,
        )

    def summed_speed(self, step: int) -> float:
        """Samples per second of all devices together, without fixed costs, jitter and odd steps."""
        return sum(1 / self.sample_s(rank, step) for rank in range(len(self.speeds)))

    def best_shares(self, step: int, batch: int) -> tuple[int, ...]:
        """The best shares for somebody who knows this step's speeds, but not its draws."""
        quiet = Devices(speeds=self.speeds, fixed_s=self.fixed_s, forward_s=self.forward_s)
        ranks = range(len(self.speeds))
        apply = tuple(self.apply_s) or (0.0,) * len(ranks)
        return apportion_times(
            batch, [lambda n, r=r: round(1e6 * (apply[r] + quiet.compute_s(r, step, n))) for r in ranks]
        )


@dataclass(frozen=True)
class Run:
    devices: Devices
    seen: list[Observation]
    controller: Controller

    @property
    def changes(self) -> int:
        return len(self.controller.history)

    def total_s(self, first: int = 1) -> float:
        return sum(seen.wall_s for seen in self.seen if seen.step >= first)

    def eta(self, first: int = 1, last: int = 1 << 30) -> float:
        """Samples computed over what the devices of each moment could have computed in that time."""
        steps = [seen for seen in self.seen if first <= seen.step <= last]
        possible = sum(seen.wall_s * self.devices.summed_speed(seen.step) for seen in steps)
        return sum(sum(seen.samples) for seen in steps) / possible

    def shares(self, step: int) -> tuple[int, ...]:
        """Shares of step `step`."""
        return self.seen[step - 1].samples


def plan_of(shares: Sequence[int], *, unit: int = 1, micro_batch: int | None = None) -> Plan:
    return initial_plan(
        world_size=len(shares), global_batch_size=sum(shares), unit=unit, shares=shares, micro_batch=micro_batch
    )


def equal_plan(world_size: int, batch: int, *, unit: int = 1, micro_batch: int | None = None) -> Plan:
    return initial_plan(world_size=world_size, global_batch_size=batch, unit=unit, micro_batch=micro_batch)


def run(devices: Devices, batch: int, steps: int, limits: Limits | None = None, **settings) -> Run:
    """Run the controller from equal shares."""
    unit = settings.pop("unit", 1)
    plan = equal_plan(len(devices.speeds), batch, unit=unit, micro_batch=limits.micro_batch if limits else None)
    controller = Controller(plan, limits, **settings)
    seen = []
    for step in range(1, steps + 1):
        seen.append(devices.step(step, controller.plan))
        controller.observe(seen[-1])
    return Run(devices, seen, controller)


def fixed(devices: Devices, plan: Plan, steps: int) -> list[Observation]:
    """Run one plan throughout."""
    return [devices.step(step, plan) for step in range(1, steps + 1)]


def foreseen(devices: Devices, batch: int, steps: int) -> list[Observation]:
    """Run with each step's best shares, known beforehand."""
    return [devices.step(step, plan_of(devices.best_shares(step, batch))) for step in range(1, steps + 1)]
