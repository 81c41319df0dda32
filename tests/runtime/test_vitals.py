import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from ragtag.emulate.memory import MemoryCap, NoMemoryLimit
from ragtag.runtime.vitals import Vitals, VitalsThread, sensor_of

EVERY_S = 0.005
CPU = torch.device("cpu")


@pytest.fixture
def started():
    made: list[VitalsThread] = []

    def start(sensor: Callable, *others: Callable) -> VitalsThread:
        made.append(thread := VitalsThread(sensor, *others, every_s=EVERY_S))
        thread.start()
        return thread

    yield start
    for thread in made:
        thread.close()


def until(done: Callable[[], object]) -> None:
    end_s = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end_s
        time.sleep(EVERY_S)


def test_what_the_sensor_says_is_there(started):
    thread = started(lambda: lambda: Vitals(memory_bytes=17))
    until(lambda: thread.latest.memory_bytes == 17)


def test_nothing_is_known_before_the_first_look():
    thread = VitalsThread(lambda: lambda: Vitals(memory_bytes=17), every_s=1000)
    thread.start()
    assert thread.latest == Vitals()
    thread.close()


def test_a_sensor_that_raises_is_asked_again(started):
    looks = []

    def look() -> Vitals:
        looks.append(None)
        if len(looks) == 2:
            raise RuntimeError("the driver is gone")
        return Vitals(temperature_c=40.0 + len(looks))

    thread = started(lambda: look)
    until(lambda: thread.latest.temperature_c > 42)


def test_what_was_known_is_forgotten_when_a_sensor_fails_for_good(started):
    working = [True]

    def look() -> Vitals:
        if working:
            return Vitals(busy=0.5)
        raise OSError("no such device")

    thread = started(lambda: look)
    until(lambda: thread.latest.busy)
    working.clear()
    until(lambda: not thread.latest.busy)


def test_a_sensor_that_cannot_be_made_is_tried_again(started):
    tries = []

    def make() -> Callable[[], Vitals]:
        tries.append(None)
        if len(tries) < 3:
            raise ImportError("not yet")
        return lambda: Vitals(clock_mhz=1000.0)

    thread = started(make)
    until(lambda: thread.latest.clock_mhz)


def test_a_sensor_that_never_answers_holds_nobody_up(started):
    asked, answers = threading.Event(), threading.Event()

    def look() -> Vitals:
        asked.set()
        answers.wait(60)
        return Vitals()

    thread = started(lambda: look)
    assert asked.wait(30)
    assert thread.latest == Vitals()
    began_s = time.monotonic()
    thread.close()
    assert time.monotonic() - began_s < 20
    answers.set()


def test_looking_around_that_fails_ends_nothing(started):
    elapsed: list[float] = []

    def look_around(elapsed_s: float) -> None:
        elapsed.append(elapsed_s)
        if len(elapsed) == 1:
            raise ValueError("unheard of")

    thread = started(lambda: lambda: Vitals(busy=0.25), look_around)
    until(lambda: thread.latest.busy)
    assert min(elapsed) >= EVERY_S / 2


def test_it_is_started_once_and_not_after_its_end():
    def threads() -> int:
        return sum(thread.name == "ragtag-vitals" for thread in threading.enumerate())

    before = threads()
    thread = VitalsThread(lambda: Vitals, every_s=1000)
    thread.start()
    thread.start()
    assert threads() == before + 1
    thread.close()
    until(lambda: threads() == before)
    thread.start()
    assert threads() == before
    VitalsThread(lambda: Vitals).close()


def test_a_processor():
    look = sensor_of(CPU, NoMemoryLimit())
    for _ in range(2):
        vitals = look()
    assert 1 << 20 < vitals.memory_bytes <= 1.01 * vitals.peak_memory_bytes
    assert 0 <= vitals.busy <= 1
    assert vitals.clock_mhz >= 0
    assert vitals.temperature_c >= 0


def test_emulated_memory():
    memory = MemoryCap(1 << 20, device="small")
    model = torch.nn.Linear(32, 32)
    memory.attach(model)
    look = sensor_of(CPU, memory)
    with memory.forward_backward():
        loss = model(torch.zeros(64, 32)).square().sum()
        vitals = look()
        assert vitals.memory_bytes == memory.used_bytes > 4 * (32 * 32 + 32)
        loss.backward()
    assert look().peak_memory_bytes == memory.peak_bytes >= vitals.memory_bytes
    memory.detach()


class NVMLError(Exception):
    pass


def fake_nvml(found: list[str]) -> SimpleNamespace:
    def clock(handle: str, which: int) -> int:
        raise NVMLError("not supported")

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: found.append(uuid) or "handle",
        nvmlDeviceGetTemperature=lambda handle, which: 61,
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=93),
    )


def test_an_accelerator_as_far_as_its_driver_tells(monkeypatch):
    def reserved(device: torch.device) -> int:
        raise RuntimeError("not here")

    module = SimpleNamespace(mem_get_info=lambda device: (3, 10), max_memory_reserved=reserved)
    found: list[str] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="4711"))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(found))
    vitals = sensor_of(torch.device("cuda:1"), NoMemoryLimit())()
    assert vitals == Vitals(memory_bytes=7, temperature_c=61.0, busy=0.93)
    assert found == ["GPU-4711"], "by UUID, since numbers differ under CUDA_VISIBLE_DEVICES"


def test_an_accelerator_without_its_vendors_library(monkeypatch):
    module = SimpleNamespace(mem_get_info=lambda device: (3, 10), max_memory_reserved=lambda device: 8)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for device in ("cuda:0", "xpu:0"):
        assert sensor_of(torch.device(device), NoMemoryLimit())() == Vitals(7, 8)
