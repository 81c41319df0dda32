import collections
import dataclasses
import itertools
import os
import pickle
import random
import time

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.loading import Numbers, make, opening, processes_of, read
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ragtag.core.errors import DataError

Pair = collections.namedtuple("Pair", "x y")


class Noisy(Dataset):
    """Random numbers of all three kinds, as augmentations draw them."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.rand(2), numpy.random.rand(2), random.random()


@pytest.fixture
def opened():
    with opening() as build:
        yield build


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
    assert read(loader, [5], step=2).tolist() == [5]
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
