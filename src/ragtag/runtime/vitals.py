"""How this rank's device is: memory in use, temperature, clock, and how much of the time it works.

The one idea: a thread of its own looks every two seconds and leaves the numbers where the next vote finds them, so a
sensor that answers slowly, or never, holds nobody up.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragtag.emulate.memory import MemoryCap, MemoryLimit

try:
    import resource
except ImportError:  # Windows
    resource = None

EVERY_S = 2.0
_SENSORS_EVERY = 5
"""Temperature and clock of a processor take milliseconds to read, and change slowly: every so many looks."""


class Vitals(NamedTuple):
    """0: not known."""

    memory_bytes: int = 0
    """In use now: of this process on the CPU, of the whole device on an accelerator."""
    peak_memory_bytes: int = 0
    """Most that this process has used."""
    temperature_c: float = 0.0
    clock_mhz: float = 0.0
    busy: float = 0.0
    """Part of the time in which the device worked, for anybody."""


Sensor = Callable[[], Vitals]


class VitalsThread:
    """Looks at this rank's device while the run lasts.

    Args:
        sensor: makes the function that looks, on the thread itself, since finding out what there is may take long.
        look_around: called with the seconds since its last call; see `Contention`.
        every_s: seconds between two looks.
    """

    def __init__(
        self,
        sensor: Callable[[], Sensor],
        look_around: Callable[[float], None] = lambda elapsed_s: None,
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.latest = Vitals()
        self.cpu_s = 0.0
        """Processor seconds that the thread has used."""
        self._sensor, self._look_around, self._every_s = sensor, look_around, every_s
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, if that has not begun."""
        if self._thread is None and not self._ending.is_set():
            self._thread = threading.Thread(target=self._watch, name="ragtag-vitals", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End it, without waiting for a sensor that does not answer."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(0.5)

    def _watch(self) -> None:
        look: Sensor | None = None
        before_s = time.monotonic()
        while not self._ending.wait(self._every_s):
            now_s = time.monotonic()
            elapsed_s, before_s = now_s - before_s, now_s
            try:
                self._look_around(elapsed_s)
                look = look or self._sensor()
                self.latest = look()
            except Exception:  # whatever a driver makes of it: nothing is known, and the run goes on
                self.latest = Vitals()
            self.cpu_s = time.thread_time()


def sensor_of(device: torch.device, memory: MemoryLimit) -> Sensor:
    """Return what looks at `device`; where it is emulated, its `memory` is the emulated one."""
    look = _processor() if device.type == "cpu" else _accelerator(device)
    if not isinstance(memory, MemoryCap):
        return look
    return lambda: look()._replace(memory_bytes=memory.used_bytes, peak_memory_bytes=memory.peak_bytes)


def _processor() -> Sensor:
    import psutil

    process, looks, sensors = psutil.Process(), 0, (0.0, 0.0)
    psutil.cpu_percent()  # the first one has nothing to compare with

    def look() -> Vitals:
        nonlocal looks, sensors
        if looks % _SENSORS_EVERY == 0:
            sensors = _processor_temperature(psutil), _processor_clock()
        looks += 1
        return Vitals(process.memory_info().rss, _peak_bytes(), *sensors, psutil.cpu_percent() / 100)

    return look


def _processor_temperature(psutil: Any) -> float:
    """The hottest of the processor's own sensors, in degrees Celsius."""
    read = getattr(psutil, "sensors_temperatures", None)
    if read is None:
        return 0.0
    groups = read()
    own = [groups[name] for name in ("coretemp", "k10temp", "zenpower", "cpu_thermal") if name in groups]
    return max((float(each.current) for group in own for each in group), default=0.0)


def _processor_clock(cpus: Path = Path("/sys/devices/system/cpu")) -> float:
    """The clock of the first core in MHz."""
    with suppress(OSError, ValueError):
        return int((cpus / "cpu0/cpufreq/scaling_cur_freq").read_text()) / 1e3
    return 0.0


def _peak_bytes() -> int:
    if resource is None:
        return 0
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _accelerator(device: torch.device) -> Sensor:
    module = torch.get_device_module(device)
    handle, nvml = _nvml_handle(device)

    def look() -> Vitals:
        used = peak = 0
        with suppress(RuntimeError, AttributeError):
            free, total = module.mem_get_info(device)
            used = total - free
        with suppress(RuntimeError, AttributeError):
            peak = module.max_memory_reserved(device)
        temperature = clock = busy = 0.0
        if nvml is not None:
            with suppress(nvml.NVMLError):
                temperature = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            with suppress(nvml.NVMLError):
                clock = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            with suppress(nvml.NVMLError):
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return Vitals(used, peak, temperature, clock, busy)

    return look


def _nvml_handle(device: torch.device) -> tuple[Any, Any]:
    """The driver's handle of an NVIDIA device, found by its UUID (numbers differ under CUDA_VISIBLE_DEVICES), and its
    library; Nones where nvidia-ml-py is not installed."""
    if device.type != "cuda":
        return None, None
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"), pynvml
    except Exception:  # not there, or the driver does not answer: then nothing is known
        return None, None
