"""Many calls at once, each of which bounds its own time, and what is left of a deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

_AT_ONCE = 64


def each(items: Sequence[I], function: Callable[[I], T]) -> list[T]:
    """Return `function` of each item, in order, computed by up to 64 threads at once. `function` bounds its own time.

    The first exception of any is raised once all have ended.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            try:
                results[index] = function(items[index])
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="ragtag-doctor", daemon=True) for _ in range(min(_AT_ONCE, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]


def left_s(deadline_s: float) -> float:
    """Return the seconds until the monotonic `deadline_s`, at least 1 ms."""
    return max(0.001, deadline_s - time.monotonic())
