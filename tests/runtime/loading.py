"""What the loader's tests share: a dataset of numbers, and a way to read some of it at once."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from ragtag.runtime.loader import UnitLoader

CPU = torch.device("cpu")


class Numbers(Dataset):
    """dataset[i] is i; `act` may do something first."""

    def __init__(self, size=64, act=None):
        self.size, self.act = size, act

    def __len__(self):
        return self.size

    def __getitem__(self, index) -> Any:
        if self.act:
            self.act(index)
        return torch.tensor(index)


def make(dataset, **words):
    return UnitLoader(dataset, **{"device": CPU, "seed": 7, **words})


@contextlib.contextmanager
def opening() -> Iterator[Any]:
    """Gives a function that makes loaders, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def build(dataset, **words):
            return stack.enter_context(contextlib.closing(make(dataset, **words)))

        yield build


def read(loader, indices, *, step=1, epoch=0):
    """All of `indices`, a unit each, as one micro-batch."""
    keys = [(step, unit) for unit in range(len(indices))]
    for key, index in zip(keys, indices):
        loader.request(key, epoch, (index,))
    return loader.take(keys)


def processes_of(loader):
    return [psutil.Process(worker.pid) for worker in loader._workers]


def wait_until_gone(processes, limit_s=20.0):
    """Whether all end within the limit; those that nobody has reaped count as ended."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        time.sleep(0.02)
    return False
