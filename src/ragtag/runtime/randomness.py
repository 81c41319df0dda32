"""Set the generators that user code draws from, and put them back.

The one idea: user code draws from torch's, NumPy's and Python's *global* generators, so whoever seeds them for one
sample or unit leaves them afterwards as it found them; nothing outside may notice.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy.random
import torch


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed torch (the CPU and, if given, the accelerator `device`), NumPy and `random` with `seed` in [0, 2**63).

    Costs about 20 us without an accelerator; `torch.manual_seed`, which visits every backend, costs 125.
    """
    torch.default_generator.manual_seed(seed)
    # NumPy's legacy generator takes 32 bits; the low bits of `seed_for` are as well mixed as all of them.
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    if device is not None and device.type != "cpu":
        with _current(device):
            torch.get_device_module(device).manual_seed(seed)


@contextlib.contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore torch's (CPU and, if given, accelerator `device`), NumPy's and `random`'s states at exit.

    Costs about 90 us without an accelerator.
    """
    module = None if device is None or device.type == "cpu" else torch.get_device_module(device)
    torch_state, numpy_state, python_state = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    device_state = None
    if module is not None:
        with _current(device):
            device_state = module.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)
        if module is not None:
            with _current(device):
                module.set_rng_state(device_state)


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Make an indexed `device` current: per-device generators are reached through the current device."""
    if device is None or device.index is None or device.type == "mps":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)
