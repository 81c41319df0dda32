"""For how long this rank's threads could have run and did not, because their processor did something else.

The one idea: the kernel counts it, for each thread (`run_delay`, the second number of /proc/self/task/ID/schedstat,
Linux Documentation/scheduler/sched-stats.rst). No other figure tells a device that is slow from one that is shared.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

_NANO = 1e-9
_MOST_THREADS = 6
_BUSY = 0.1
"""Part of a core that a thread uses which is worth watching."""
_DATA_THREAD = "ragtag-data"


class _Thread:
    """One thread's counters, in a file that stays open."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.alive = True

    def read(self) -> tuple[float, float]:
        """Seconds that it ran, and that it waited for a processor; zeros once it has ended."""
        try:
            ran, waited, *_ = os.pread(self._file, 64, 0).split()
            return _NANO * int(ran), _NANO * int(waited)
        except (OSError, ValueError):
            self.alive = False
            return 0.0, 0.0

    def close(self) -> None:
        os.close(self._file)


class Contention:
    """Of one rank, step by step. The training thread calls `begin_work` and `end_work`, another one `look_around`.

    Args:
        tasks: where the kernel tells of this process's threads. Where there is nothing, everything is 0.
        named_threads: numbers and names of Python's own threads.
    """

    def __init__(
        self,
        tasks: Path = Path("/proc/self/task"),
        named_threads: Callable[[], Sequence[tuple[int | None, str]]] = lambda: [
            (thread.native_id, thread.name) for thread in threading.enumerate()
        ],
    ) -> None:
        self._tasks, self._named_threads = tasks, named_threads
        self._threads: dict[int, _Thread] = {}
        self._training = self._data = 0
        self._others: tuple[int, ...] = ()
        """Busy threads of libraries, such as those of operators and of backward."""
        self._ran: dict[int, float] = {}
        self._marks: dict[int, float] = {}
        self._work_s = 0.0
        self._faults = major_faults()
        self._lock = threading.Lock()

    def begin_work(self) -> None:
        """The calling thread begins this rank's own work of a step."""
        training = threading.get_native_id()
        if training != self._training:
            self._training = training
            self._find_data_thread()
        with self._lock:
            self._marks = self._read(self._training)
        self._work_s = 0.0

    def end_work(self) -> None:
        """It is done; what comes next is waiting for the sum over ranks."""
        with self._lock:
            now = self._read(self._training, self._data)
            delays = [now[number] - self._marks.get(number, now[number]) for number in now if number != self._data]
            self._work_s = max([0.0, *delays])
            self._marks = now

    def take(self) -> tuple[float, float]:
        """Return seconds that own work has waited for a processor, and that receiving has since `end_work`."""
        with self._lock:
            now = self._read(self._data)
            delays = [now[number] - self._marks.get(number, now[number]) for number in now]
            self._marks = now
        work_s, self._work_s = self._work_s, 0.0
        return work_s, max([0.0, *delays])

    def take_faults(self) -> int:
        """Return how many pages had to be read from disk since the last call."""
        before, self._faults = self._faults, major_faults()
        return self._faults - before

    def look_around(self, elapsed_s: float) -> None:
        """Find out which threads are busy, `elapsed_s` seconds after the last call; takes a fraction of a
        millisecond."""
        python = {number for number, _ in self._named_threads()}
        ran: dict[int, float] = {}
        try:
            numbers = [int(name) for name in os.listdir(self._tasks)]
        except (OSError, ValueError):
            return
        for number in numbers:
            if number in python:
                continue
            try:
                ran[number] = _NANO * int((self._tasks / str(number) / "schedstat").read_bytes().split()[0])
            except (OSError, ValueError, IndexError):
                continue
        self._find_data_thread()
        used = sorted(((ran[number] - self._ran.get(number, 0.0), number) for number in ran), reverse=True)
        with self._lock:
            self._ran = ran
            self._others = tuple([n for used_s, n in used[:_MOST_THREADS] if used_s > _BUSY * elapsed_s])
            self._forget(keep={*self._others, self._training, self._data})

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            self._others, self._training, self._data = (), 0, 0
            self._forget(keep=set())

    def _find_data_thread(self) -> None:
        for number, name in self._named_threads():
            if name == _DATA_THREAD and number is not None:
                self._data = number  # the newest, where an old generation's has not ended

    def _read(self, *numbers: int) -> dict[int, float]:
        """Seconds of waiting for a processor, of these threads and of busy ones."""
        delays = {}
        for number in (*numbers, *self._others):
            thread = self._threads.get(number)
            if thread is None and number:
                try:
                    thread = self._threads[number] = _Thread(self._tasks / str(number) / "schedstat")
                except OSError:
                    continue
            if thread is not None and thread.alive:
                delays[number] = thread.read()[1]
        return delays

    def _forget(self, keep: set[int]) -> None:
        for number in [number for number in self._threads if number not in keep]:
            self._threads.pop(number).close()


def major_faults() -> int:
    """Return how many pages of this process had to be read from disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt if resource is not None else 0
