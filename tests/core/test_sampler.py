import math
from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.errors import SettingError
from ragtag.core.sampler import Sampler, permute

seeds = st.integers(0, 2**63 - 1)


def sampler(dataset_size: int, global_batch_size: int, seed: int = 0, shuffle: bool = True) -> Sampler:
    return Sampler(dataset_size=dataset_size, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle)


def standard_deviations_off(counts: Counter, cells: int) -> float:
    """How far the chi-square statistic against equal cells is from its mean, in standard deviations."""
    expected = counts.total() / cells
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    statistic += (cells - len(counts)) * expected
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


def epoch_order(of: Sampler, epoch: int) -> list[int]:
    order = []
    for number in range(of.steps_per_epoch):
        step = epoch * of.steps_per_epoch + number + 1
        order.extend(of.indices(step, 0, of.batch(step).size))
    return order


@given(st.integers(1, 400), st.integers(1, 500), seeds, st.booleans(), st.integers(0, 3))
def test_every_index_exactly_once_an_epoch(dataset_size, global_batch_size, seed, shuffle, epoch):
    order = epoch_order(sampler(dataset_size, global_batch_size, seed, shuffle), epoch)
    assert sorted(order) == list(range(dataset_size))


@given(st.integers(1, 400), st.integers(1, 500), seeds, st.integers(1, 50))
def test_batches_tile_the_epoch(dataset_size, global_batch_size, seed, step):
    of = sampler(dataset_size, global_batch_size, seed)
    batch, after = of.batch(step), of.batch(step + 1)
    assert 1 <= batch.size <= global_batch_size
    assert batch.epoch == (step - 1) // of.steps_per_epoch
    if after.epoch == batch.epoch:
        assert after.first == batch.first + batch.size
        assert batch.size == global_batch_size
    else:
        assert after.first == 0
        assert batch.first + batch.size == dataset_size


@given(st.integers(1, 10**12), st.integers(1, 2000), seeds, st.integers(1, 10**9), st.data())
@settings(max_examples=50)
def test_any_part_of_a_batch_can_be_asked_for_alone(dataset_size, global_batch_size, seed, step, data):
    of = sampler(dataset_size, global_batch_size, seed)
    batch = of.batch(step)
    start = data.draw(st.integers(0, batch.size))
    stop = data.draw(st.integers(start, min(batch.size, start + 20)))
    part = of.indices(step, start, stop)
    assert part == tuple(of.index(batch.epoch, batch.first + position) for position in range(start, stop))
    assert all(0 <= index < dataset_size for index in part)


@given(st.integers(1, 5000), seeds)
def test_permute_is_a_bijection(size, key):
    assert sorted(permute(range(size), size, key)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_all_orders_of_a_small_dataset_are_equally_likely(size):
    orders = math.factorial(size)
    counts = Counter(tuple(epoch_order(sampler(size, size, seed), 0)) for seed in range(min(40 * orders, 20_000)))
    assert abs(standard_deviations_off(counts, orders)) < 5
    assert set(counts) <= set(permutations(range(size)))


def test_successive_epochs_of_a_small_dataset_are_independent():
    of = sampler(3, 3, seed=9)
    orders = [tuple(epoch_order(of, epoch)) for epoch in range(6001)]
    assert abs(standard_deviations_off(Counter(pairwise(orders)), 36)) < 5


@pytest.mark.parametrize("size", [1000, 1024, 1100])
def test_index_is_independent_of_position(size):
    # Sizes on both sides of the change in the number of rounds; positions and indices in 20 classes each.
    counts = Counter()
    for key in range(8):
        for position, index in enumerate(permute(range(size), size, key)):
            counts[position * 20 // size, index * 20 // size] += 1
    # Margins are fixed, so 19 x 19 of the 400 cells are free and the statistic's mean is about 361, deviation 27.
    expected = 8 * size / 400
    statistic = sum(
        (counts[cell] - expected) ** 2 / expected for cell in ((i, j) for i in range(20) for j in range(20))
    )
    assert abs(statistic - 361) < 5 * 27


@pytest.mark.parametrize("size", [15, 24, 35])
def test_pairs_of_positions_get_all_pairs_of_indices_equally_often(size):
    counts = Counter(permute((0, 1), size, key) for key in range(8000))
    assert abs(standard_deviations_off(counts, size * (size - 1))) < 5


def test_neighbours_are_not_kept_together():
    order = permute(range(5000), 5000, key=1)
    near = sum(abs(a - b) <= 2 for a, b in pairwise(order))
    # Expected 4 times 4999 / 4999 = 4.
    assert near < 20


def test_orders_are_pinned():
    # A resumed run must find the same samples with a later version of ragtag.
    assert epoch_order(sampler(10, 4, seed=1), 0) == [7, 9, 0, 8, 2, 3, 5, 6, 1, 4]
    assert sampler(1_281_167, 256, seed=1).indices(12345, 100, 104) == (1152866, 190098, 1192984, 1199170)


def test_without_shuffle_the_order_is_the_datasets():
    assert epoch_order(sampler(7, 3, shuffle=False), 2) == list(range(7))


def test_one_sample():
    of = sampler(1, 8)
    assert of.steps_per_epoch == 1
    assert [of.indices(step, 0, 1) for step in (1, 2, 3)] == [(0,)] * 3


@pytest.mark.parametrize("name", ["dataset_size", "global_batch_size"])
def test_sizes_below_one_are_refused(name):
    sizes = {"dataset_size": 5, "global_batch_size": 5, name: 0}
    with pytest.raises(SettingError, match=f"{name} = 0"):
        Sampler(**sizes, seed=0, shuffle=True)
