"""Waiting for a processor, as a kernel that is a directory tells of it."""

import os
import threading
from pathlib import Path

import pytest

from ragtag.runtime.contention import Contention, major_faults

DATA, LIBRARY, ANOTHER, PYTHON = 1001, 1002, 1003, 1004


class Kernel:
    """Counters of threads, in seconds."""

    def __init__(self, tasks: Path) -> None:
        self.tasks = tasks
        self.training = threading.get_native_id()
        self.names = [(self.training, "MainThread"), (DATA, "ragtag-data"), (PYTHON, "a-script's")]
        self._counters: dict[int, list[float]] = {}
        for number in (self.training, DATA, LIBRARY, ANOTHER, PYTHON):
            self.runs(number, 0.0)

    def runs(self, number: int, ran_s: float = 0.0, *, waits_s: float = 0.0) -> None:
        counters = self._counters.setdefault(number, [0.0, 0.0])
        counters[0] += ran_s
        counters[1] += waits_s
        directory = self.tasks / str(number)
        directory.mkdir(exist_ok=True)
        (directory / "schedstat").write_text(f"{round(1e9 * counters[0])} {round(1e9 * counters[1])} 17\n")

    def ends(self, number: int) -> None:
        """What is open gives nothing any more, and there is nothing to open."""
        (self.tasks / str(number) / "schedstat").write_text("")
        (self.tasks / str(number) / "schedstat").unlink()

    @property
    def contention(self) -> Contention:
        return Contention(self.tasks, lambda: self.names)


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


def test_own_work_that_waits(kernel):
    contention = kernel.contention
    contention.begin_work()
    kernel.runs(kernel.training, 0.5, waits_s=0.2)
    contention.end_work()
    assert contention.take() == pytest.approx((0.2, 0.0))
    assert contention.take() == (0.0, 0.0), "once"


def test_waiting_outside_of_own_work_does_not_count(kernel):
    contention = kernel.contention
    kernel.runs(kernel.training, waits_s=1.0)
    contention.begin_work()
    contention.end_work()
    kernel.runs(kernel.training, waits_s=1.0)
    assert contention.take() == (0.0, 0.0)


def test_what_receives_from_others(kernel):
    contention = kernel.contention
    contention.begin_work()
    kernel.runs(DATA, waits_s=0.4)  # while there is own work it does not matter
    contention.end_work()
    kernel.runs(DATA, waits_s=0.1)
    assert contention.take() == pytest.approx((0.0, 0.1))


def test_busy_threads_of_libraries_are_found_and_the_one_that_waits_longest_counts(kernel):
    contention = kernel.contention
    contention.look_around(1.0)
    for number in (LIBRARY, ANOTHER):
        kernel.runs(number, 0.8)
    contention.look_around(1.0)
    contention.begin_work()
    kernel.runs(kernel.training, waits_s=0.1)
    kernel.runs(LIBRARY, waits_s=0.3)
    kernel.runs(ANOTHER, waits_s=0.2)
    contention.end_work()
    assert contention.take() == pytest.approx((0.3, 0.0)), "they wait at the same time"


def test_threads_that_hardly_run_and_pythons_own_are_not_watched(kernel):
    contention = kernel.contention
    contention.look_around(1.0)
    kernel.runs(LIBRARY, 0.05)
    kernel.runs(PYTHON, 0.9)
    contention.look_around(1.0)
    contention.begin_work()
    kernel.runs(LIBRARY, waits_s=0.3)
    kernel.runs(PYTHON, waits_s=0.3)
    contention.end_work()
    assert contention.take() == (0.0, 0.0)


def test_a_thread_that_is_found_in_the_midst_of_work_counts_from_then_on(kernel):
    contention = kernel.contention
    contention.begin_work()
    kernel.runs(LIBRARY, 0.8, waits_s=0.7)
    contention.look_around(1.0)
    contention.end_work()
    assert contention.take() == (0.0, 0.0)
    contention.begin_work()
    kernel.runs(LIBRARY, waits_s=0.2)
    contention.end_work()
    assert contention.take() == pytest.approx((0.2, 0.0))


def test_only_so_many_threads_are_watched(kernel):
    for number in range(2000, 2040):
        kernel.runs(number, 1.0)
    contention = kernel.contention
    contention.look_around(1.0)
    contention.begin_work()
    assert len(contention._threads) <= 8
    contention.close()


def test_a_thread_that_ends(kernel):
    contention = kernel.contention
    kernel.runs(LIBRARY, 0.9)
    contention.look_around(1.0)
    contention.begin_work()
    kernel.ends(LIBRARY)
    kernel.ends(DATA)
    kernel.runs(kernel.training, waits_s=0.1)
    contention.end_work()
    assert contention.take() == pytest.approx((0.1, 0.0))
    contention.look_around(1.0)
    contention.begin_work()
    contention.end_work()
    assert contention.take() == (0.0, 0.0)


def test_what_receives_ends_before_it_is_asked(kernel):
    contention = kernel.contention
    kernel.runs(DATA, waits_s=5.0)
    contention.begin_work()
    contention.end_work()
    kernel.ends(DATA)
    assert contention.take() == (0.0, 0.0)


def test_a_new_generation_has_a_new_data_thread(kernel):
    contention = kernel.contention
    contention.begin_work()
    contention.take()
    kernel.names.append((1010, "ragtag-data"))
    kernel.runs(1010)
    contention.look_around(1.0)
    contention.begin_work()
    contention.end_work()
    kernel.runs(DATA, waits_s=0.5)
    kernel.runs(1010, waits_s=0.1)
    assert contention.take() == pytest.approx((0.0, 0.1))


def test_where_the_kernel_tells_nothing_everything_is_nothing(tmp_path):
    contention = Contention(tmp_path / "none")
    contention.look_around(1.0)
    contention.begin_work()
    contention.end_work()
    assert contention.take() == (0.0, 0.0)
    contention.close()


def test_lines_that_are_no_counters(kernel):
    contention = kernel.contention
    for text in ("", "17", "words here\n", "1 2"):
        (kernel.tasks / str(LIBRARY) / "schedstat").write_text(text)
        (kernel.tasks / str(DATA) / "schedstat").write_text(text)
        contention.look_around(1.0)
        contention.begin_work()
        contention.end_work()
        assert contention.take() == (0.0, 0.0)
    (kernel.tasks / "no number").mkdir()
    contention.look_around(1.0)


def test_no_file_stays_open(kernel):
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    contention = kernel.contention
    kernel.runs(LIBRARY, 0.9)
    contention.look_around(1.0)
    contention.begin_work()
    contention.end_work()
    assert num_open() == before + 3
    kernel.runs(ANOTHER, 0.9)
    contention.look_around(1.0)
    contention.begin_work()
    contention.end_work()
    assert num_open() == before + 3, "those that are busy no more are closed"
    contention.close()
    assert num_open() == before
    assert contention.take() == (0.0, 0.0)


def test_the_real_kernel_is_understood():
    contention = Contention()
    contention.look_around(1.0)
    contention.begin_work()
    contention.end_work()
    work_s, link_s = contention.take()
    assert work_s >= 0.0
    assert link_s >= 0.0
    assert contention.take_faults() >= 0
    contention.close()


def test_pages_read_from_disk_are_told_once(monkeypatch):
    counts = iter([10, 17, 17])
    monkeypatch.setattr("ragtag.runtime.contention.major_faults", lambda: next(counts))
    contention = Contention()
    assert contention.take_faults() == 7
    assert contention.take_faults() == 0


def test_a_system_that_counts_no_pages(monkeypatch):
    monkeypatch.setattr("ragtag.runtime.contention.resource", None)
    assert major_faults() == 0
