import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.comm.ring import Ring, RingTime, mesh_exchange, schedule
from ragtag.comm.transport import LocalTransport, TransportError
from ragtag.core.chunks import chunk_sizes
from ragtag.core.errors import SettingError

torch.set_num_threads(1)
thorough = settings(deadline=None, max_examples=80)


def on_threads(ends: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Run function(end) for each rank on a thread; return results, or the exception a rank raised, by rank."""
    results: list[Any] = [None] * len(ends)

    def run(rank: int) -> None:
        try:
            results[rank] = function(ends[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def successes(ends: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    results = on_threads(ends, function)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def folded(
    values: Sequence[torch.Tensor], chunks: Sequence[int], round_partial=lambda partial: partial
) -> torch.Tensor:
    """What a ring computes, without one: chunk o is x[o+1] + x[o+2] + ... + x[o], rounded whenever it is sent."""
    world_size, offset, parts = len(chunks), 0, []
    for owner, size in enumerate(chunks):
        mine = slice(offset, offset + size)
        total = values[(owner + 1) % world_size][mine]
        for distance in range(2, world_size + 1):
            total = values[(owner + distance) % world_size][mine] + round_partial(total)
        parts.append(total)
        offset += size
    return torch.cat(parts)


def to_bf16_and_back(partial: torch.Tensor) -> torch.Tensor:
    return partial.bfloat16().float()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@st.composite
def reductions(draw, dtypes=(torch.float32, torch.float64, torch.int64)):
    """(values by rank, chunks, segment_bytes)"""
    chunks = draw(st.lists(st.integers(0, 40), min_size=2, max_size=5))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = [(torch.randn(sum(chunks), generator=generator) * 1000).to(dtype) for _ in chunks]
    return values, chunks, draw(st.sampled_from([1, 8, 24, 64, 4096]))


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=9).filter(any))
def test_chunk_sizes_are_the_nearest_integers_to_the_shares(total, weights):
    sizes = chunk_sizes(total, weights)
    assert sum(sizes) == total
    for size, weight in zip(sizes, weights):
        assert abs(size * sum(weights) - total * weight) < sum(weights)
        assert weight > 0 or size == 0


def test_chunk_sizes_break_ties_by_rank_and_refuse_what_is_no_share():
    assert chunk_sizes(8, [1, 1, 1]) == [3, 3, 2]
    assert chunk_sizes(10, [7, 0, 3]) == [7, 0, 3]
    for weights in ([0, 0], [2, -1], []):
        with pytest.raises(SettingError, match="chunk weights"):
            chunk_sizes(10, weights)


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=8), st.integers(1, 9), st.sampled_from(["sum", "copy", "both"])
)
def test_schedules_of_all_ranks_fit_together(chunks, segment, what):
    n = len(chunks)
    first_hop, last_hop = {"sum": (0, n - 1), "copy": (n - 1, 2 * n - 2), "both": (0, 2 * n - 2)}[what]
    events = [schedule(tuple(chunks), segment, rank, first_hop, last_hop)[0] for rank in range(n)]
    for rank in range(n):
        sent = [(event.start, event.stop) for event in events[rank] if event.sends]
        received = [(event.start, event.stop) for event in events[(rank + 1) % n] if event.receives]
        assert sent == received
        assert all(0 < event.stop - event.start <= segment for event in events[rank])
    # Walk them on one thread, blocking where a rank would: somebody can always go on.
    position, arrived = [0] * n, [0] * n
    while any(position[rank] < len(events[rank]) for rank in range(n)):
        moved = False
        for rank in range(n):
            while position[rank] < len(events[rank]):
                event = events[rank][position[rank]]
                if event.receives and not arrived[rank]:
                    break
                arrived[rank] -= event.receives
                arrived[(rank + 1) % n] += event.sends
                position[rank] += 1
                moved = True
        assert moved, "deadlock"
    assert arrived == [0] * n


@thorough
@given(reductions())
def test_all_reduce_is_the_sum_with_equal_bits_everywhere(case):
    values, chunks, segment_bytes = case

    def reduce(transport):
        flat = values[transport.rank].clone()
        Ring(transport, segment_bytes).all_reduce(flat, chunks, 1)
        return flat

    results = successes(LocalTransport.mesh(len(chunks)), reduce)
    expected = folded(values, chunks)
    plain = torch.stack([value.double() for value in values]).sum(0)
    magnitude = torch.stack([value.double().abs() for value in values]).sum(0)
    precision = {torch.float32: 1e-6, torch.float64: 1e-12, torch.int64: 0.0}[expected.dtype]
    for result in results:
        assert same_bits(result, expected)
        assert bool(((result.double() - plain).abs() <= precision * magnitude).all())


@thorough
@given(reductions())
def test_reduce_scatter_and_all_gather_are_the_two_halves_of_all_reduce(case):
    values, chunks, segment_bytes = case

    def reduce(transport):
        flat = values[transport.rank].clone()
        ring = Ring(transport, segment_bytes)
        ring.reduce_scatter(flat, chunks, 1)
        start = sum(chunks[: transport.rank])
        mine = slice(start, start + chunks[transport.rank])
        scattered = flat[mine].clone()
        flat.fill_(-1)
        flat[mine] = scattered
        ring.all_gather(flat, chunks, 2)
        return scattered, flat

    expected = folded(values, chunks)
    for rank, (scattered, gathered) in enumerate(successes(LocalTransport.mesh(len(chunks)), reduce)):
        assert same_bits(scattered, expected.split(list(chunks))[rank])
        assert same_bits(gathered, expected)


@thorough
@given(reductions(dtypes=(torch.float32, torch.bfloat16, torch.float16)))
def test_bf16_wire_keeps_bits_equal_and_errors_within_its_roundings(case):
    values, chunks, segment_bytes = case

    def reduce(transport):
        flat = values[transport.rank].clone()
        Ring(transport, segment_bytes).all_reduce(flat, chunks, 1, "bf16")
        scattered = values[transport.rank].clone()
        ring = Ring(transport, segment_bytes)
        ring.reduce_scatter(scattered, chunks, 2, "bf16")
        ring.all_gather(scattered, chunks, 3, "bf16")
        return flat, scattered

    wide = [value.float() for value in values]
    rounded = to_bf16_and_back(folded(wide, chunks, to_bf16_and_back))
    magnitude = torch.stack([value.abs() for value in wide]).sum(0)
    bound = 1.1 * len(chunks) * 2**-8 * magnitude
    assert bool(((rounded - torch.stack(wide).sum(0)).abs() <= bound).all())
    for result, in_two_steps in successes(LocalTransport.mesh(len(chunks)), reduce):
        assert same_bits(result, rounded.to(result.dtype))
        if result.dtype != torch.float16:  # fp16 is rounded between the two steps, before the wire rounds it.
            assert same_bits(in_two_steps, result)


@thorough
@given(reductions(dtypes=(torch.bfloat16, torch.float16)))
def test_half_precision_tensors_are_summed_in_fp32_and_rounded_once(case):
    values, chunks, segment_bytes = case

    def reduce(transport):
        flat = values[transport.rank].clone()
        Ring(transport, segment_bytes).all_reduce(flat, chunks, 1)
        return flat

    expected = folded([value.float() for value in values], chunks).to(values[0].dtype)
    for result in successes(LocalTransport.mesh(len(chunks)), reduce):
        assert same_bits(result, expected)


def test_reduce_scatter_does_not_round_the_owners_sum_to_the_wire():
    fine = torch.tensor([1.0 + 2**-20, 1.0 + 2**-20])

    def reduce(transport):
        flat = fine.clone() if transport.rank == 0 else torch.ones(2)
        Ring(transport).reduce_scatter(flat, [1, 1], 1, "bf16")
        return flat[transport.rank].item()

    assert successes(LocalTransport.mesh(2), reduce)[0] == 2.0 + 2**-20


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_calls_of_different_kinds_sizes_and_tags_do_not_mix(wire):
    tags = [2**30 - 1, 2**30, 2**31, 2**31 + 5, 2**40, 0, 1]
    sizes = [[7, 0, 3], [1, 1, 1], [0, 0, 9], [300, 100, 4], [2, 2, 2], [0, 0, 0], [5, 6, 7]]

    def reduce(transport):
        ring, results = Ring(transport, 64), []
        for tag, chunks in zip(tags, sizes):
            flat = torch.full((sum(chunks),), float(tag % 64 + transport.rank))
            ring.all_reduce(flat, chunks, tag, wire)
            gathered = torch.full((sum(chunks),), float(transport.rank))
            ring.all_gather(gathered, chunks, tag)
            votes = mesh_exchange(transport, torch.tensor([transport.rank, tag % 256], dtype=torch.uint8), tag)
            results.append((flat, gathered, torch.stack(votes).tolist()))
        return results

    for results in successes(LocalTransport.mesh(3), reduce):
        for tag, chunks, (flat, gathered, votes) in zip(tags, sizes, results):
            assert flat.tolist() == [3.0 * (tag % 64) + 3] * sum(chunks)
            assert gathered.tolist() == [float(rank) for rank, size in enumerate(chunks) for _ in range(size)]
            assert votes == [[rank, tag % 256] for rank in range(3)]


def test_a_strided_view_is_reduced_in_place():
    def reduce(transport):
        table = torch.zeros(6, 2)
        table[:, 1] = transport.rank + 1.0
        Ring(transport, 8).all_reduce(table[:, 1], [2, 4], 1)
        return table

    for table in successes(LocalTransport.mesh(2), reduce):
        assert table.tolist() == [[0.0, 3.0]] * 6


def test_one_rank_alone_keeps_its_values():
    (transport,) = LocalTransport.mesh(1)
    flat = torch.arange(5.0)
    for call in (Ring(transport).all_reduce, Ring(transport).reduce_scatter, Ring(transport).all_gather):
        call(flat, [5], 1)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert mesh_exchange(transport, flat.view(torch.uint8), 1)[0] is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_bf16_wire_is_refused_where_it_would_lose_what_was_asked_for(dtype):
    (transport,) = LocalTransport.mesh(1)
    with pytest.raises(SettingError, match="bf16"):
        Ring(transport).all_reduce(torch.zeros(3, dtype=dtype), [3], 1, "bf16")


class Recorder:
    """Keeps what it passes on, so that a test can name one message of a ring."""

    def __init__(self, transport: LocalTransport) -> None:
        self.inner, self.rank, self.world_size = transport, transport.rank, transport.world_size
        self.sent: list[tuple[int, int]] = []

    def send(self, tensor, peer, tag):
        self.sent.append((peer, tag))
        return self.inner.send(tensor, peer, tag)

    def receive(self, tensor, peer, tag):
        return self.inner.receive(tensor, peer, tag)

    def close(self) -> None:
        self.inner.close()


def tag_of_all_reduce(chunks, number) -> int:
    recorders = [Recorder(transport) for transport in LocalTransport.mesh(len(chunks))]
    successes(recorders, lambda end: Ring(end, 8).all_reduce(torch.zeros(sum(chunks)), chunks, number))
    return recorders[0].sent[0][1]


def test_a_message_that_comes_late_changes_nothing():
    chunks = [5, 3, 4]
    transports = LocalTransport.mesh(3)
    deliver = transports[1].hold(2, tag_of_all_reduce(chunks, 1))
    delivered = threading.Event()

    def release() -> None:
        delivered.set()
        deliver()

    def reduce(transport):
        flat = torch.arange(12.0) + transport.rank
        Ring(transport, 8).all_reduce(flat, chunks, 1)
        assert delivered.is_set()  # Every chunk passes the link from 1 to 2 before it is complete at all ranks.
        return flat

    threading.Timer(0.05, release).start()
    for flat in successes(transports, reduce):
        assert flat.tolist() == [3.0 * position + 3 for position in range(12)]


def test_a_failed_message_raises_at_once_and_names_the_peer():
    chunks = [5, 3, 4]
    transports = LocalTransport.mesh(3, timeout_s=20)
    transports[2].fail(1, tag_of_all_reduce(chunks, 1))

    def reduce(transport):
        try:
            Ring(transport, 8).all_reduce(torch.zeros(12), chunks, 1)
        finally:
            transport.close()

    errors = on_threads(transports, reduce)
    assert [type(error) for error in errors] == [TransportError] * 3
    assert errors[2].peer == 1
    assert "scripted" in str(errors[2])
    assert not any(error.timed_out for error in errors)


def test_a_closed_rank_fails_messages_posted_before_and_after_at_once():
    transports = LocalTransport.mesh(3, timeout_s=20)
    before = transports[0].receive(torch.zeros(1), 1, 7)
    unaffected = transports[0].receive(torch.zeros(1), 2, 7)
    transports[1].close()
    for pending in (before, transports[0].send(torch.zeros(1), 1, 7), transports[1].send(torch.zeros(1), 2, 7)):
        with pytest.raises(TransportError, match="closed") as caught:
            pending.wait()
        assert not caught.value.timed_out
    transports[2].send(torch.ones(1), 0, 7).wait()
    unaffected.wait()


def test_a_rank_that_never_comes_is_waited_for_as_long_as_promised():
    transports = LocalTransport.mesh(2, timeout_s=0.1)
    with pytest.raises(TransportError, match=r"rank 1 .* silent for 0.1 s") as caught:
        Ring(transports[0]).all_reduce(torch.zeros(4), [2, 2], 1)
    assert (caught.value.peer, caught.value.timed_out) == (1, True)


def test_ranks_that_call_differently_never_match():
    def reduce(transport):
        chunks = [[2, 2], [1, 3]][transport.rank]
        Ring(transport).all_reduce(torch.zeros(4), chunks, 1)

    errors = on_threads(LocalTransport.mesh(2, timeout_s=0.1), reduce)
    assert all(isinstance(error, TransportError) for error in errors)


def test_an_all_reduce_tells_what_it_cost_the_thread_and_waiting_is_not_in_it():
    """Rank 1's first message is held back: rank 0 waits, and is not busy meanwhile."""
    ends = LocalTransport.mesh(2)
    values = [torch.ones(40_000), torch.ones(40_000)]
    tags = []
    plain_send = ends[1].send

    def late_send(tensor, peer, tag):
        tags.append(tag)
        release = ends[1].hold(peer, tag) if len(tags) == 1 else None
        pending = plain_send(tensor, peer, tag)
        if release is not None:
            threading.Timer(0.3, release).start()
        return pending

    ends[1].send = late_send
    began_s = time.perf_counter()
    efforts = successes(ends, lambda end: Ring(end).all_reduce(values[end.rank], [20_000, 20_000], 1))
    took_s = time.perf_counter() - began_s
    assert all(bool((value == 2).all()) for value in values)
    assert took_s >= 0.3
    for effort in efforts:
        assert 0 < effort.add_cpu_s <= effort.cpu_s
    assert efforts[0].busy_s <= took_s - 0.3 + 0.05


def test_one_rank_has_no_effort():
    (end,) = LocalTransport.mesh(1)
    assert Ring(end).all_reduce(torch.ones(3), [3], 1) == RingTime()
