import collections
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from typing import Any

import numpy
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ragtag.core.errors import DataError, SettingError
from ragtag.runtime.loader import UnitLoader, check_dataset, loader_settings

CPU = torch.device("cpu")
Pair = collections.namedtuple("Pair", "x y")


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


class Noisy(Dataset):
    """Random numbers of all three kinds, as augmentations draw them."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.rand(2), numpy.random.rand(2), random.random()


def make(dataset, **words):
    return UnitLoader(dataset, **{"device": CPU, "seed": 7, **words})


@pytest.fixture
def opened():
    """Makes loaders that are closed afterwards."""
    loaders = []

    def build(dataset, **words):
        loaders.append(make(dataset, **words))
        return loaders[-1]

    yield build
    for loader in loaders:
        loader.close()


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


# ---- exactly once, whatever happens to the plan


@pytest.fixture(scope="module")
def ranks_in_process():
    return [make(Numbers()) for _ in range(3)]


@pytest.fixture(scope="module")
def ranks_with_workers():
    ranks = [make(Numbers(), num_workers=2) for _ in range(2)]
    yield ranks
    for loader in ranks:
        loader.close()


steps_used = itertools.count(1)


def train_an_epoch(ranks, draw):
    """Read one epoch in steps of 12 samples in units of 1 to 5, while units change hands at random."""
    unit_size = draw(st.integers(1, 5))
    steps = [(next(steps_used), range(start, min(start + 12, 64))) for start in range(0, 64, 12)]
    spans = {
        (step, unit): positions[begin : begin + unit_size]
        for step, positions in steps
        for unit, begin in enumerate(range(0, len(positions), unit_size))
    }
    owner = {key: draw(st.integers(0, len(ranks) - 1)) for key in spans}
    seen = []
    for step, _ in steps:
        ahead = step + draw(st.integers(0, 2))
        for change in range(draw(st.integers(0, 3))):
            moved = draw(st.sampled_from([key for key in spans if key[0] >= step]))
            owner[moved] = draw(st.integers(0, len(ranks) - 1))
            for rank, loader in enumerate(ranks):
                mine = {key for key in spans if owner[key] == rank}
                loader.keep(mine if change % 2 else mine.__contains__)
                for key in sorted(mine):
                    if step <= key[0] <= ahead:
                        loader.request(key, 0, spans[key])
        for rank, loader in enumerate(ranks):
            keys = sorted(key for key in spans if key[0] == step and owner[key] == rank)
            for key in keys:
                loader.request(key, 0, spans[key])
            while keys:
                count = draw(st.integers(1, len(keys)))
                batch = loader.take(keys[:count]).tolist()
                assert batch == [index for key in keys[:count] for index in spans[key]]
                seen += batch
                del keys[:count]
    assert sorted(seen) == list(range(64))
    assert not any(loader._units for loader in ranks)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_sample_is_taken_exactly_once(ranks_in_process, data):
    train_an_epoch(ranks_in_process, data.draw)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_sample_is_taken_exactly_once_with_workers(ranks_with_workers, data):
    train_an_epoch(ranks_with_workers, data.draw)


# ---- what is read, and how often


def test_in_process_nothing_is_read_before_it_is_taken(opened):
    loader = opened(Numbers())
    loader.request((1, 0), 0, (3, 4))
    loader.request((1, 1), 0, (5,))
    loader.keep({(1, 1)})
    assert loader.reads == 0
    assert loader.take([(1, 1)]).tolist() == [5]
    assert loader.reads == 1


def test_what_was_prefetched_and_is_still_ours_is_not_read_again(opened):
    loader = opened(Numbers(), num_workers=2)
    for unit in range(8):
        loader.request((1, unit), 0, (unit,))
    # The last unit's arrival says nothing about the others'; all of them have to be here.
    deadline = time.monotonic() + 20
    while loader.reads < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    loader.keep(lambda key: key[1] % 2 == 0)
    for unit in (0, 2, 4, 6):
        loader.request((1, unit), 0, (unit,))
    assert loader.take([(1, unit) for unit in (0, 2, 4, 6)]).tolist() == [0, 2, 4, 6]
    assert loader.reads == 8


def test_what_is_no_longer_ours_is_not_read_once_the_worker_gets_there(opened, tmp_path):
    def wait_for_gate(index):
        while not (tmp_path / "gate").exists():
            time.sleep(0.01)

    loader = opened(Numbers(512, wait_for_gate), num_workers=1)
    for index in range(300):
        loader.request((1, index), 0, (index,))
    loader.keep(())
    (tmp_path / "gate").touch()
    assert read(loader, [5]).tolist() == [5]
    assert loader.reads < 50  # what the worker had been given already, of 300


def test_a_claimed_unit_of_this_step_overtakes_prefetched_steps(opened, tmp_path):
    def log(index):
        with open(tmp_path / "log", "a") as file:
            file.write(f"{index} ")

    loader = opened(Numbers(512, log), num_workers=1)
    for index in range(100, 400):
        loader.request((2, index), 0, (index,))
    loader.request((1, 0), 0, (5,))
    loader.take([(1, 0)])
    loader.take([(2, index) for index in range(100, 400)])
    order = [int(word) for word in (tmp_path / "log").read_text().split()]
    assert sorted(order) == [5, *range(100, 400)]
    assert order.index(5) < 100


def test_asking_again_reads_once_and_taking_again_reads_again(opened):
    loader = opened(Numbers(), num_workers=1)
    for _ in range(3):
        loader.request((1, 0), 0, (9,))
    assert loader.take([(1, 0)]).tolist() == [9]
    assert read(loader, [9]).tolist() == [9]
    assert loader.reads == 2


def test_work_is_spread_over_workers(opened):
    class Whose(Numbers):
        def __getitem__(self, index):
            time.sleep(0.005)  # long enough that one worker cannot do it all before the other wakes up
            return os.getpid()

    loader = opened(Whose(), num_workers=2)
    pids = collections.Counter(read(loader, range(40)).tolist())
    assert set(pids) == {process.pid for process in processes_of(loader)}
    assert min(pids.values()) >= 5


def test_many_at_once_is_used_only_without_seeding(opened):
    class Many(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(-index) for index in indices]

    for workers in (0, 1):
        for seed_samples, expected in ((True, [3, 4]), (False, [-3, -4])):
            loader = opened(Many(), num_workers=workers, seed_samples=seed_samples)
            loader.request((1, 0), 0, (3, 4))
            assert loader.take([(1, 0)]).tolist() == expected
            assert loader.reads == 2


def test_many_at_once_must_return_as_many(opened):
    class Short(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(0)]

    for workers in (0, 1):
        loader = opened(Short(), num_workers=workers, seed_samples=False)
        loader.request((1, 0), 0, (3, 4))
        with pytest.raises(DataError, match=r"__getitems__\(\[3, 4\]\) returned 1 samples, not 2"):
            loader.take([(1, 0)])


# ---- random numbers


def test_samples_do_not_depend_on_who_reads_them_or_when(opened):
    expected = read(opened(Noisy()), range(32), epoch=3)
    for workers, order in (
        (0, list(range(31, -1, -1))),
        (1, list(range(32))),
        (2, random.Random(1).sample(range(32), 32)),
    ):
        batch = read(opened(Noisy(), num_workers=workers), order, epoch=3)
        for part, whole in zip(batch, expected):
            assert torch.equal(part, whole[order])


def test_samples_depend_on_epoch_and_seed_and_differ(opened):
    first = read(opened(Noisy()), range(8))[0]
    assert len({tuple(row) for row in first.tolist()}) == 8
    assert not torch.equal(first, read(opened(Noisy()), range(8), epoch=1)[0])
    assert not torch.equal(first, read(opened(Noisy(), seed=8), range(8))[0])


def test_collating_is_seeded_by_the_unit_and_nobody_else_notices(opened):
    def mask(samples):
        return torch.rand(len(samples))

    states = torch.get_rng_state(), random.getstate(), pickle.dumps(numpy.random.get_state())
    loader = opened(Noisy(), collate_fn=mask)
    first, again, other = read(loader, [1, 2]), read(loader, [1, 2]), read(loader, [1, 2], step=2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), pickle.dumps(numpy.random.get_state()))


def test_without_seeding_workers_draw_different_numbers(opened):
    loader = opened(Noisy(), num_workers=2, seed_samples=False)
    assert len({tuple(row) for row in read(loader, range(32))[0].tolist()}) == 32


# ---- what a sample may be


@dataclasses.dataclass
class Document:
    text: str
    tokens: list


class Everything(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {
            "pair": Pair(torch.full((3,), float(index)), (numpy.arange(index + 1), [index, "text"])),
            "ragged": torch.arange(index),
            "large": torch.full((5000,), index, dtype=torch.bfloat16),
            "strided": torch.arange(6).reshape(2, 3).T,
            "fortran": numpy.asfortranarray(numpy.full((60, 70), index, dtype=numpy.int64)),
            "scalar": torch.tensor(index, dtype=torch.bool),
            "sparse": torch.eye(3).to_sparse(),
            "document": Document("x" * index, [index]),
            "bytes": b"\0" * index,
            "none": None,
            "twice": [torch.ones(2)] * 2,
        }


def as_text(value):
    """A form in which tensors and arrays can be compared, with their types."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.to_dense().tolist())
    if isinstance(value, numpy.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [as_text(item) for item in value])
    return value


def test_any_object_survives_the_way_from_a_worker(opened):
    loader = opened(Everything(), num_workers=2, collate_fn=list)
    samples = read(loader, range(4))
    assert [as_text(sample) for sample in samples] == [as_text(Everything()[index]) for index in range(4)]
    for sample in samples:  # in place, as augmentations in a collate_fn do; warnings are errors
        sample["large"].mul_(2)
        sample["pair"].x.add_(1)
        sample["fortran"] += 1
        sample["pair"].y[0][:] = 0


def test_nested_samples_are_collated_like_a_stock_loader_does(opened):
    class Nested(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"pair": Pair(torch.full((2,), index), index), "list": [index, (1.5, "a")]}

    expected = next(iter(DataLoader(Nested(), batch_size=8)))
    for workers in (0, 2):
        batch = read(opened(Nested(), num_workers=workers), range(8))
        assert as_text(batch) == as_text(expected)
        assert type(batch["pair"]) is Pair


def test_large_samples_arrive_whole(opened):
    class Large(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.arange(index, index + (2 << 20), dtype=torch.int32)

    loader = opened(Large(), num_workers=2)
    batch = read(loader, range(6))
    assert batch.shape == (6, 2 << 20)
    assert torch.equal(batch[:, 0], torch.arange(6, dtype=torch.int32))
    assert torch.equal(batch[5], Large()[5])


def test_pinning_without_an_accelerator_does_nothing(opened):
    assert read(opened(Numbers(), pin_memory=True), [1, 2]).tolist() == [1, 2]


def test_ragged_samples_name_the_way_out(opened):
    class Ragged(Numbers):
        def __getitem__(self, index):
            return torch.zeros(index)

    with pytest.raises(
        DataError, match=r"collate_fn failed on the samples 3, 4 \(step 1\).*RuntimeError.*'collate_fn'"
    ):
        read(opened(Ragged()), [3, 4])


def test_speed_beside_a_stock_loader(opened, record_property):
    dataset = TensorDataset(torch.arange(32_000.0).reshape(1000, 32))
    stock = DataLoader(dataset, batch_size=50, num_workers=2)
    started = time.perf_counter()
    expected = torch.cat([batch[0] for batch in stock])
    record_property("stock_s", time.perf_counter() - started)
    started = time.perf_counter()
    loader = opened(dataset, num_workers=2)
    for step in range(20):
        for unit in range(50):
            loader.request((step, unit), 0, (step * 50 + unit,))
    batches = [loader.take([(step, unit) for unit in range(50)])[0] for step in range(20)]
    record_property("ours_s", time.perf_counter() - started)
    assert torch.equal(torch.cat(batches), expected)


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


# ---- what a user may say


def test_settings_are_taken_as_given():
    chosen = loader_settings({"num_workers": 3, "collate_fn": list, "pin_memory": True})
    assert (chosen.num_workers, chosen.collate_fn, chosen.pin_memory, chosen.prefetch) == (3, list, True, 2)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ({"num_worker": 2}, "no setting 'num_worker'. Did you mean 'num_workers'"),
        ({"batch_size": 2}, "'batch_size'.*global_batch_size"),
        ({"shuffle": True}, "'shuffle'.*argument of Trainer"),
        ({"sampler": None}, "'sampler'.*seed"),
        ({"batch_sampler": None}, "'batch_sampler'.*plan"),
        ({"drop_last": True}, "'drop_last'.*once"),
        ({"prefetch_factor": 2}, "'prefetch_factor'.*prefetch"),
        ({"num_workers": -1}, "'num_workers'.*-1"),
        ({"num_workers": True}, "'num_workers'.*True"),
        ({"prefetch": 1.5}, "'prefetch'.*1.5"),
        ({"pin_memory": "yes"}, "'pin_memory'.*'yes'"),
        ({"collate_fn": 3}, "'collate_fn'.*int"),
        ({"multiprocessing_context": "frok"}, "'multiprocessing_context'.*Did you mean 'fork'"),
        (DataLoader(Numbers()), "loader is a DataLoader"),
        ([], "loader is a list"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(loader, text):
    with pytest.raises(SettingError, match=text):
        loader_settings(loader)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class BrokenLength(NoLength):
    def __len__(self):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Endless(), "IterableDataset.*__getitem__"),
        (NoLength(), "NoLength needs __len__"),
        (BrokenLength(), "BrokenLength failed: gone"),
        (iter([1]), "needs __len__"),
        ([], "empty"),
        (DataLoader(Numbers()), r"DataLoader.*loader.dataset"),
        ({"train": [1]}, "keys .'train'."),
        (Numbers, "class Numbers"),
    ],
)
def test_datasets_that_cannot_be_read_by_index_are_refused(dataset, text):
    with pytest.raises(DataError, match=text):
        check_dataset(dataset)


@pytest.mark.parametrize("dataset", [[1, 2], Numbers(), TensorDataset(torch.ones(2)), torch.ones(3), numpy.ones(2)])
def test_anything_with_length_and_index_is_a_dataset(dataset):
    check_dataset(dataset)
