"""The few places where a CPU and an accelerator differ: which device, how to time it, how to reach host memory.

`torch.accelerator` raises on machines without one and `torch.Event` cannot time the CPU, so both kinds of clock live
here.
"""

import os
import platform
import time
from collections.abc import Mapping

import torch

from ragtag.core.errors import LaunchError


def choose_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this process: RAGTAG_DEVICE, else the accelerator numbered LOCAL_RANK, else the CPU."""
    if wanted := environ.get("RAGTAG_DEVICE"):
        try:
            return torch.device(wanted)
        except RuntimeError as error:
            raise LaunchError(f"RAGTAG_DEVICE={wanted!r} is no device: {error}") from None
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise LaunchError(
            f"LOCAL_RANK is {local_rank} but this host has {count} accelerator(s). Start at most {count} worker(s) "
            f"here, or set RAGTAG_DEVICE=cpu for the others."
        )
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, local_rank)


def device_kind(device: torch.device) -> str:
    """What must be equal for two devices to compute identical bits: model name, or CPU capability and threads."""
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} threads={torch.get_num_threads()}"
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    return f"{device.type} {name}"


def make_current(device: torch.device) -> None:
    """Make an accelerator the current one: events and random generators are reached through the current device."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


@torch.no_grad()
def move_to(device: torch.device, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> None:
    """Put a model where it is trained, and what its optimizer keeps so far.

    Where it is not to be `whole` there, its buffers only: it is cut on the host, since all of it may not fit.
    """
    if not whole:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        return
    model.to(device)
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                kept[name] = value.to(parameter.device)


def copies_asynchronously(device: torch.device) -> bool:
    """Whether a copy from the host may be left to itself: what it reads is staged or pinned before the call returns."""
    return device.type in ("cuda", "xpu")


class Stopwatch:
    """Adds up the time a device spends between `start` and `stop`, without making anyone wait for it.

    On an accelerator, events are recorded and only read in `take`, after the step's one synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type in ("cpu", "mps")
        self._seconds = 0.0
        self._started = 0.0
        self._pairs: list[tuple[torch.Event, torch.Event]] = []

    def start(self) -> None:
        """Begin a region; regions do not nest."""
        if self._on_host:
            self._started = time.perf_counter()
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._pairs.append((event, event))

    def stop(self) -> None:
        """End the region begun last."""
        if self._on_host:
            self._seconds += time.perf_counter() - self._started
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._pairs[-1] = (self._pairs[-1][0], event)

    def take(self) -> float:
        """Seconds measured since the last `take`; call it once the device has finished that work."""
        seconds, self._seconds = self._seconds, 0.0
        for begin, end in self._pairs:
            seconds += begin.elapsed_time(end) / 1e3
        self._pairs.clear()
        return seconds

    def forget(self) -> None:
        """Drop what was measured since the last `take`."""
        self._seconds = 0.0
        self._pairs.clear()


class HostMirror:
    """Host memory that a device's flat tensor passes through on its way to other ranks.

    On the CPU, or where nothing `travels` because there is only one rank, it *is* that tensor. On an accelerator it is
    pinned, copies are asynchronous, and `ready` is what the communication thread calls before it reads, so the
    training thread never waits.
    """

    def __init__(self, flat: torch.Tensor, *, travels: bool = True) -> None:
        self._flat = flat
        self._same = flat.device.type == "cpu" or not travels
        self.host = flat if self._same else torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._event: torch.Event | None = None

    def send(self) -> None:
        """Start copying device to host."""
        if not self._same:
            self.host.copy_(self._flat, non_blocking=True)
            self._event = torch.Event(self._flat.device)
            self._event.record()

    def ready(self) -> None:
        """Block (on the communication thread) until the host copy is complete."""
        if self._event is not None:
            self._event.synchronize()

    def receive(self) -> None:
        """Start copying host to device."""
        if not self._same:
            self._flat.copy_(self.host, non_blocking=True)


def statistics_dtype(device: torch.device) -> torch.dtype:
    """fp64 wherever the device has it; MPS has none."""
    return torch.float32 if device.type == "mps" else torch.float64
