"""Paces this process like a slower device: a region of work takes the wall time which that device would need.

The one idea: the region has an absolute schedule, and hooks on the parameters hold each gradient back until the
device would have had it. What a region's end alone held back could be hidden behind communication that no real device
could have begun (measured: 0.996 of the ideal instead of an honest 0.768). What happens after the last gradient, such
as waiting for an all-reduce inside `backward()`, is never part of the pace.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ragtag.core.errors import SettingError
from ragtag.emulate.account import Account, PaceReport
from ragtag.emulate.readiness import FORWARD, Event, Readiness
from ragtag.emulate.schedule import DeviceSchedule

Region = AbstractContextManager[None]

_SHORTEST_SLEEP_PART = 0.01
_SHORTEST_SLEEP_S = 2e-3
"""A hook does not sleep for less than the smaller of the two (the first is a part of the region): the gradients of one
layer come together, and a sleep costs 25-50 us of CPU time, the rest of a hook 1."""


class Pace(Protocol):
    """The seam: a step marks its regions, and they take the time that they should."""

    def attach(self, model: torch.nn.Module) -> None:
        """Pace the gradients of `model`'s parameters; before it is wrapped by anything."""
        ...

    def detach(self) -> None:
        """Leave no hook on the model."""
        ...

    def step(self, number: int) -> None:
        """Announce step `number`, counted from 1."""
        ...

    def forward_backward(self, samples: int) -> Region:
        """One micro-batch of `samples`; without gradients (`torch.no_grad`), its forward part only."""
        ...

    def part(self, samples: int, fraction: float, *, micro_batch: int) -> Region:
        """A `fraction` of a micro-batch's forward and backward, of a stage of the model; its gradients go nowhere
        before it ends.

        Args:
            micro_batch: its number in the step, from 0 on.
        """
        ...

    def optimizer(self) -> Region:
        """The optimizer step."""
        ...

    def fixed(self) -> Region:
        """Other work of a step that does not shrink with the batch."""
        ...

    @property
    def honest(self) -> bool:
        """Whether the real work fitted into the pace so far."""
        ...

    def report(self) -> PaceReport | None:
        """What was asked for and what it took; None where nothing is paced."""
        ...


class NoPace:
    """Everything takes the time it takes."""

    honest = True

    def attach(self, model: torch.nn.Module) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    def step(self, number: int) -> None:
        """Do nothing."""

    def forward_backward(self, samples: int) -> Region:
        """Return a region that does nothing."""
        return nullcontext()

    def part(self, samples: int, fraction: float, *, micro_batch: int) -> Region:
        """Return a region that does nothing."""
        return nullcontext()

    def optimizer(self) -> Region:
        """Return a region that does nothing."""
        return nullcontext()

    def fixed(self) -> Region:
        """Return a region that does nothing."""
        return nullcontext()

    def report(self) -> None:
        """Return None."""
        return


class _Running:
    """A region under way."""

    __slots__ = (
        "arrived_s",
        "counts",
        "cpu_start_s",
        "duration_s",
        "entered_s",
        "gradients",
        "marks",
        "released_s",
        "slept_s",
        "start_s",
    )

    def __init__(self, *, entered_s: float, start_s: float, duration_s: float, cpu_start_s: float) -> None:
        self.entered_s = entered_s
        self.start_s = start_s
        self.duration_s = duration_s
        self.cpu_start_s = cpu_start_s
        self.slept_s = 0.0
        self.gradients = 0
        self.arrived_s = self.released_s = entered_s
        """When the last gradient was really there, and when it was let go."""
        self.counts: dict[int, int] = {}
        self.marks: list[tuple[Event, float]] = []


class DevicePace:
    """Paces work as a `DeviceSchedule` says. One thread uses it: the one that calls `backward()`.

    Args:
        schedule: what each region takes.
        clock: wall clock, in seconds.
        cpu_clock: CPU time of this thread, in seconds.
        sleep: waits so many seconds; may wait longer, which the next region makes good.
    """

    def __init__(
        self,
        schedule: DeviceSchedule,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._schedule = schedule
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep
        self._account = Account(schedule.device.name)
        self._readiness = Readiness(0)
        self._hooks: list[Any] = []
        self._step = 1
        self._micro_batch = 0
        self._region: _Running | None = None

    @property
    def honest(self) -> bool:
        """Whether the real work fitted into the pace so far."""
        return self._account.honest

    def report(self) -> PaceReport:
        """What was asked for and what it took."""
        return self._account.report()

    def attach(self, model: torch.nn.Module) -> None:
        """Put hooks on `model` and its trainable parameters.

        They are tensor hooks, which autograd runs before it accumulates a gradient: hence before DDP's reducer and
        before post-accumulate hooks, whoever registered first.

        Raises:
            SettingError: the model is not on the CPU, where alone a hook can hold the backward up.
        """
        self.detach()
        away = next((name for name, parameter in model.named_parameters() if parameter.device.type != "cpu"), None)
        if away is not None:
            raise SettingError(
                f"Emulated device '{self._schedule.device.name}': parameter '{away}' is on "
                f"{model.get_parameter(away).device}, but only work on the CPU can be paced. Set RAGTAG_DEVICE=cpu."
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._readiness = Readiness(len(trained))
        reach = self._reach

        def forward_ends(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if module is model:  # not a copy of it, which would bring the hook along
                reach(FORWARD)

        self._hooks = [model.register_forward_hook(forward_ends)]
        for index, parameter in enumerate(trained):
            self._hooks.append(parameter.register_hook(lambda grad, index=index: reach(index)))

    def detach(self) -> None:
        """Take all hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def step(self, number: int) -> None:
        """Announce step `number`: its micro-batches count from 0 again."""
        self._step = number
        self._micro_batch = 0

    @contextmanager
    def forward_backward(self, samples: int) -> Iterator[None]:
        """One micro-batch of `samples`. Without gradients only its forward part is paced, and it is not counted."""
        backward = torch.is_grad_enabled()
        if backward:
            stall_s = self._schedule.stall_s(self._step, self._micro_batch)
            if stall_s > 0:
                self._sleep(stall_s)
        region = self._enter(self._schedule.compute_s(self._step, self._micro_batch, samples))
        self._micro_batch += backward
        if not backward:
            region.duration_s *= self._readiness.forward
        with self._running(region):
            yield
        if backward and self._hooks and not region.gradients:
            region.duration_s *= self._readiness.forward  # nothing needed a gradient
        if region.marks and region.gradients and self._readiness.learning:
            self._readiness.record(region.marks)
        self._leave(region, samples=samples if region.gradients or not self._hooks else 0)

    def part(self, samples: int, fraction: float, *, micro_batch: int) -> Region:
        """A `fraction` of a micro-batch's forward and backward. Stalls are not emulated in it."""
        return self._whole(fraction * self._schedule.compute_s(self._step, micro_batch, samples))

    def optimizer(self) -> Region:
        """The optimizer step."""
        return self._whole(self._schedule.optimizer_s(self._step))

    def fixed(self) -> Region:
        """Other work of a step that does not shrink with the batch."""
        return self._whole(self._schedule.fixed_s(self._step))

    @contextmanager
    def _whole(self, duration_s: float) -> Iterator[None]:
        if duration_s == 0:
            yield
            return
        region = self._enter(duration_s)
        with self._running(region):
            yield
        self._leave(region, samples=0)

    @contextmanager
    def _running(self, region: _Running) -> Iterator[None]:
        assert self._region is None, "regions do not nest"
        self._region = region
        try:
            yield
        finally:
            self._region = None

    def _enter(self, duration_s: float) -> _Running:
        entered_s = self._clock()
        return _Running(
            entered_s=entered_s,
            start_s=entered_s - self._account.repay(duration_s),
            duration_s=duration_s,
            cpu_start_s=self._cpu_clock(),
        )

    def _reach(self, source: int) -> None:
        """An event of the region under way: wait until the device would have got there."""
        region = self._region
        if region is None:
            return
        event = source, region.counts.get(source, 0)
        region.counts[source] = event[1] + 1
        if self._readiness.learning:
            region.marks.append((event, self._cpu_clock() - region.cpu_start_s))
        fraction = self._readiness.fraction(event, region.gradients)
        now_s = self._clock()
        if source != FORWARD:
            region.gradients += 1
            region.arrived_s = now_s
        elif not torch.is_grad_enabled():
            return
        left_s = region.start_s + region.duration_s * fraction - now_s
        if left_s > min(_SHORTEST_SLEEP_S, _SHORTEST_SLEEP_PART * region.duration_s):
            self._sleep(left_s)
            after_s = self._clock()
            region.slept_s += after_s - now_s
            now_s = after_s
        if source != FORWARD:
            region.released_s = now_s

    def _leave(self, region: _Running, *, samples: int) -> None:
        now_s = self._clock()
        if region.gradients:
            done_s = region.released_s  # what came after is somebody's wait
        else:
            done_s = region.arrived_s = now_s
        busy_s = region.arrived_s - region.entered_s
        cpu_s = self._cpu_clock() - region.cpu_start_s
        end_s = region.start_s + region.duration_s
        if now_s < end_s:
            self._sleep(end_s - now_s)
            done_s = self._clock()
        self._account.add(
            asked_s=region.duration_s,
            busy_s=busy_s,
            late_s=max(0.0, done_s - end_s),
            slept_s=region.slept_s,
            cpu_s=cpu_s,
            samples=samples,
        )
