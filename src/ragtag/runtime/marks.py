"""Moments of a device's work, and when in a backward each bucket of gradients is complete.

The one idea: on an accelerator a moment is an event, read once the device has got there, so looking does not make the
device wait.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any
"""Seconds on this machine's clock, or an event of the device."""


def mark(device: torch.device) -> Mark:
    """Return a mark for what the device has been given to do until now."""
    if device.type in ("cpu", "mps"):
        if device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_from(start: Mark, marks: Sequence[Mark]) -> list[float]:
    """Return the seconds from `start` to each of `marks`; the device has done all of it afterwards."""
    if isinstance(start, float):
        return [each - start for each in marks]
    for each in marks:
        each.synchronize()
    return [start.elapsed_time(each) / 1e3 for each in marks]


class Arrivals:
    """When the last gradient of each bucket comes, in the backwards that are `watched`.

    How many come to a bucket is learned from the first one; until then every gradient is marked.
    """

    def __init__(self, buckets: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self._buckets = buckets
        self._expected = [0] * len(buckets)
        self._arrived = [0] * len(buckets)
        self._marks: list[Mark | None] = [None] * len(buckets)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at one backward."""
        self._arrived = [0] * len(self._buckets)
        self._marks = [None] * len(self._buckets)
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda gone, index=index: self._arrive(index, gone.device))
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._expected = list(self._arrived)

    def marks(self) -> list[Mark]:
        """Return one mark for each bucket, or none at all where a bucket got no gradient."""
        return [each for each in self._marks if each is not None] if all(self._arrived) else []

    def _arrive(self, index: int, device: torch.device) -> None:
        self._arrived[index] += 1
        if self._arrived[index] >= self._expected[index]:
            self._marks[index] = mark(device)
