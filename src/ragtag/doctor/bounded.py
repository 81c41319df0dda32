"""Runs what may block where no signal is heard, such as a name server that does not answer, and gives up in time.

The one idea: a daemon thread is left behind rather than waited for, so neither a caller nor the process's end hangs.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

_AT_ONCE = 64


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return what `function` returns, or raise what it raises; TimeoutError after `seconds`."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=call, name="ragtag-doctor", daemon=True).start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


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
