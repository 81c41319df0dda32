"""Jobs that may block, and the threads they run on.

The one idea: a transport blocks where nobody can wake it, so only a channel's own thread calls it; everybody else
holds a `Work` and waits on a Python condition, which a completion, a notice or a deadline can wake.
"""

import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any


class Work:
    """One queued job: when it started and finished (`perf_counter` seconds), and what came of it.

    `number` counts the jobs of its channel from 1, so it means the same job on every rank. `awaited` is set, under the
    channel's condition, by who wants to be woken by this job's end.
    """

    __slots__ = ("awaited", "channel", "error", "finished_s", "number", "result", "started_s")

    def __init__(self, channel: str, number: int) -> None:
        self.channel = channel
        self.number = number
        self.awaited = False
        self.started_s: float | None = None
        self.finished_s: float | None = None
        self.error: BaseException | None = None
        self.result: Any = None

    def run(self, job: Callable[[], Any]) -> None:
        """Run `job` in this thread and keep its result or error."""
        self.started_s = perf_counter()
        try:
            self.result = job()
        except BaseException as error:
            self.error = error
        self.finished_s = perf_counter()


class Channel:
    """One daemon thread that runs jobs in the order in which they were submitted.

    `changed` is notified after each job that is awaited, so that a waiting thread is not woken for others. A job that
    fails does not stop the ones after it.
    """

    def __init__(self, name: str, changed: threading.Condition) -> None:
        self.name = name
        self.num_submitted = 0
        self.num_succeeded = 0
        self._changed = changed
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_jobs, name=f"ragtag-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Work:
        """Queue `job` and return at once. Call from one thread only."""
        self.num_submitted += 1
        work = Work(self.name, self.num_submitted)
        self._jobs.put((work, job))
        return work

    def close(self, timeout_s: float) -> bool:
        """End after the queued jobs; return whether the thread ended within `timeout_s` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_jobs(self) -> None:
        while (queued := self._jobs.get()) is not None:
            work, job = queued
            work.run(lambda job=job: self._counted(job))
            with self._changed:
                if work.awaited:
                    self._changed.notify_all()
            # A job holds its tensors; the next one may be minutes away.
            del queued, work, job

    def _counted(self, job: Callable[[], Any]) -> Any:
        # Counted before it is finished: who saw it finish may tell the others at once how many were.
        result = job()
        self.num_succeeded += 1
        return result
