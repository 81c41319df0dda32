import contextlib
import multiprocessing
import os
import signal
import sys
import time

import psutil
import pytest
import torch
from tests.runtime.loading import Numbers, make, opening, processes_of, read, wait_until_gone
from torch.utils.data import TensorDataset

from ragtag.core.errors import DataError


@pytest.fixture
def opened():
    with opening() as build:
        yield build


# ---- failures


def fail_at_five(index):
    if index == 5:
        raise KeyError("no such row")


class Unreadable(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def fail_unreadably(index):
    raise Unreadable("strange", 2)


def leave(index):
    sys.exit(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_dataset_names_the_sample(opened, workers):
    loader = opened(Numbers(act=fail_at_five), num_workers=workers)
    with pytest.raises(DataError, match=r"(?s)dataset\[5\] failed in epoch 2.*KeyError: 'no such row'") as caught:
        read(loader, [4, 5, 6], epoch=2)
    assert isinstance(caught.value.__cause__, KeyError)
    if workers:
        assert f"worker {processes_of(loader)[0].pid}" in str(caught.value).replace("loader ", "")
        assert "in fail_at_five" in str(caught.value)


# A pattern that crosses lines, because a traceback does.
@pytest.mark.parametrize(
    ("act", "text"), [(fail_unreadably, r"(?s)dataset\[1\] failed.*Unreadable: strange"), (leave, "(?s)SystemExit: 3")]
)
def test_odd_errors_in_a_worker_arrive_as_text(opened, act, text):
    with pytest.raises(DataError, match=text):
        read(opened(Numbers(act=act), num_workers=1), [1])


def test_an_error_in_a_unit_that_went_to_another_rank_is_theirs(opened):
    loader = opened(Numbers(act=fail_at_five), num_workers=1)
    loader.request((1, 0), 0, (5,))
    loader.keep(())
    assert read(loader, [6]).tolist() == [6]


def test_a_sample_that_cannot_be_pickled_is_named(opened):
    class Lambdas(Numbers):
        def __getitem__(self, index):
            return lambda: index

    with pytest.raises(DataError, match=r"(?s)dataset\[2\] failed.*pickle"):
        read(opened(Lambdas(), num_workers=1), [2])


class Stubborn:
    """Can be written but not read back."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_sample_that_cannot_be_rebuilt_is_named(opened):
    class Rebuilt(Numbers):
        def __getitem__(self, index):
            return Stubborn() if index == 2 else index

    loader = opened(Rebuilt(), num_workers=1)
    with pytest.raises(DataError, match=r"(?s)dataset\[2\] failed.*no number"):
        read(loader, [2])
    assert read(loader, [3], step=2).tolist() == [3]


def test_an_error_in_worker_init_fn_is_reported(opened):
    def init(number):
        info = torch.utils.data.get_worker_info()
        assert info is not None
        assert info.id == number
        raise OSError("no licence")

    with pytest.raises(DataError, match=r"(?s)in init.*OSError: no licence"):
        read(opened(Numbers(), num_workers=1, worker_init_fn=init), [1])


def kill_self(index):
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once(index):
    os._exit(9)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (kill_self, r"worker \d+ on .* was killed by SIGKILL.*memory.*while it read dataset\[3\] in epoch 0"),
        (exit_at_once, r"worker \d+ on .* ended by itself \(exit code 9\).*dataset\["),
    ],
)
def test_a_dead_worker_is_an_error_that_says_how(opened, act, text):
    loader = opened(Numbers(act=act), num_workers=2)
    started = time.monotonic()
    with pytest.raises(DataError, match=text):
        read(loader, range(8))
    assert time.monotonic() - started < 15


def test_a_worker_killed_while_idle_is_noticed_at_the_next_take(opened):
    loader = opened(Numbers(), num_workers=2)
    read(loader, range(8))
    [victim, _] = processes_of(loader)
    victim.kill()
    assert wait_until_gone([victim])
    with pytest.raises(DataError, match=f"worker {victim.pid} .*SIGKILL"):
        for step in range(2, 100):
            read(loader, range(16), step=step)


def block(index):
    if index == 17:
        time.sleep(600)


def test_a_sample_that_never_returns_is_an_error_within_ten_times_the_patience(opened):
    loader = opened(Numbers(act=block), num_workers=2, patience_s=0.05)
    with pytest.raises(DataError, match=r"dataset\[17\] has not returned for 0.5 s in loader worker \d+ .*patience_s"):
        read(loader, [16, 17, 18])


def test_a_failed_peer_ends_the_wait(opened):
    class PeerGone(Exception):
        pass

    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise PeerGone

    loader = opened(Numbers(act=block), num_workers=1, check=check)
    with pytest.raises(PeerGone):
        read(loader, [17])


# ---- life and death of workers


def test_close_joins_everything_even_a_busy_worker(opened):
    loader = opened(Numbers(act=block), num_workers=2)
    loader.request((1, 0), 0, (17,))
    read(loader, [1], step=2)  # by the worker that has nothing to do
    processes, threads = processes_of(loader), [worker._thread for worker in loader._workers]
    loader.close()
    loader.close()
    assert not any(process.is_running() for process in processes)
    assert not any(thread.is_alive() for thread in threads)


def test_close_does_not_wait_for_prefetched_samples_that_nobody_takes(opened):
    class Large(Numbers):
        def __getitem__(self, index):
            return torch.zeros(1 << 20)

    loader = opened(Large(), num_workers=2)
    for index in range(64):
        loader.request((1, index), 0, (index,))
    processes = processes_of(loader)
    loader.close()
    assert not any(process.is_running() for process in processes)


def test_ctrl_c_leaves_workers_to_their_parent(opened):
    loader = opened(Numbers(), num_workers=1)
    read(loader, [1])
    processes_of(loader)[0].send_signal(signal.SIGINT)
    assert read(loader, [2], step=2).tolist() == [2]


def die_with_workers(report):
    """A parent with an idle and a busy worker that is killed."""
    loader = make(Numbers(act=block), num_workers=2)
    loader.request((1, 0), 0, (17,))
    read(loader, [1], step=2)  # by the other worker
    report.send([worker.pid for worker in loader._workers])
    report.close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_die_with_their_parent_busy_or_idle():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    parent = context.Process(target=die_with_workers, args=(sender,))
    parent.start()
    sender.close()
    assert receiver.poll(30)
    pids = receiver.recv()
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    parent.join(30)
    receiver.close()
    assert parent.exitcode == -signal.SIGKILL
    parent.close()
    try:
        assert wait_until_gone(processes)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_spawned_workers_read_the_same(opened):
    dataset = TensorDataset(torch.arange(8.0))
    loader = opened(dataset, num_workers=1, multiprocessing_context="spawn")
    assert read(loader, [3, 5])[0].tolist() == [3.0, 5.0]


def test_a_dataset_that_cannot_be_sent_to_a_spawned_worker_is_an_error():
    with pytest.raises(DataError, match=r"cannot start loader worker 0 of 1.*pickled"):
        make(Numbers(act=lambda index: None), num_workers=1, multiprocessing_context="spawn")
