from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm.ring import schedule
from ragtag.control.chunks import PARTS_PER_RANK, chunk_weights, ring_work_s

seconds = st.floats(0.0, 1.0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_the_work_counted_is_that_of_the_rings_schedule(chunks):
    ranks = len(chunks)
    for rank in range(ranks):
        events, _ = schedule(tuple(chunks), 1 << 20, rank, 0, 2 * ranks - 2)
        adds = sum(event.stop - event.start for event in events if event.adds)
        sends = sum(event.stop - event.start for event in events if event.sends)
        only = [float(other == rank) for other in range(ranks)]
        none = [0.0] * ranks
        assert ring_work_s(chunks, only, none)[rank] * sum(chunks) == pytest.approx(adds)
        assert ring_work_s(chunks, none, only)[rank] * sum(chunks) == pytest.approx(sends)


def test_a_rank_that_adds_slowly_is_spared_by_the_chunk_before_it():
    choice = chunk_weights([0.01, 0.01, 0.04], [0.001] * 3)
    assert choice.weights[1] > 2 * max(choice.weights[0], choice.weights[2])
    assert choice.predicted_s < 0.4 * choice.equal_s
    assert "rank 2" in choice.reason


def test_it_does_not_pay_on_slow_links():
    choice = chunk_weights([0.01, 0.01, 0.02], [1.0] * 3)
    assert choice.weights == (1, 1, 1)
    assert choice.predicted_s == choice.equal_s


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6))
def test_never_worse_than_equal_and_as_predicted(times):
    add_s, send_s = [add for add, _ in times], [send for _, send in times]
    choice = chunk_weights(add_s, send_s)
    assert min(choice.weights) >= 0
    assert choice.predicted_s <= choice.equal_s
    if len(times) > 1:
        assert choice.predicted_s == pytest.approx(max(ring_work_s(choice.weights, add_s, send_s)))


@given(st.tuples(seconds, seconds, seconds), st.tuples(seconds, seconds, seconds))
def test_near_the_best_of_all_chunks(add_s, send_s):
    parts = 3 * PARTS_PER_RANK
    every = (
        (first, second, parts - first - second)
        for first, second in product(range(parts + 1), repeat=2)
        if first + second <= parts
    )
    best = min(max(ring_work_s(weights, add_s, send_s)) for weights in every)
    # 2 % is what equal chunks are kept for.
    assert chunk_weights(add_s, send_s).predicted_s <= 1.10 * best + 1e-9
