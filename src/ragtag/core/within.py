"""Calls what may block where no signal is heard, such as a name server or a store that does not answer, and gives up
in time.

The one idea: a daemon thread is left behind rather than waited for, so neither the caller nor the process's end hangs.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.01


def within(seconds: float, function: Callable[[], T], *, given_up: Callable[[], bool] | None = None) -> T:
    """Return what `function` returns, or raise what it raises; TimeoutError after `seconds`, or once `given_up`."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=call, name="ragtag-within", daemon=True).start()
    deadline_s = time.monotonic() + seconds
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            value, error = outcome.get(timeout=left_s if given_up is None else min(left_s, _POLL_S))
            break
        except queue.Empty:
            if left_s <= _POLL_S or given_up is None or given_up():
                raise TimeoutError(f"no answer in {seconds:.3g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
