import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, ReduceScatterOptions, TCPStore

from ragtag.comm.gloo import GlooTransport
from ragtag.comm.ring import Ring, Wire, mesh_exchange
from ragtag.comm.transport import TransportError
from ragtag.core.chunks import chunk_sizes
from ragtag.core.errors import LaunchError
from tests.comm.test_ring import folded, on_threads, same_bits, successes

gloo: Any = ProcessGroupGloo
AT_ONCE_S = 5.0  # "at once" on a busy machine, told apart from timeouts of 30 s.


def gloo_mesh(world_size: int, timeout_s: float = 30.0) -> list[GlooTransport]:
    store = HashStore()
    return successes(
        range(world_size), lambda rank: GlooTransport(store, rank, world_size, timeout_s=timeout_s, address="127.0.0.1")
    )


@pytest.fixture(scope="module")
def worlds():
    """By world size: the ends under test, and gloo's own collectives as the reference."""

    def reference(store, rank, world_size):
        options = gloo._Options()
        options._timeout = timedelta(seconds=30)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return gloo(store, rank, world_size, options)

    made = {}
    for world_size in (2, 3, 4):
        store = PrefixStore(f"reference{world_size}", HashStore())
        references = successes(range(world_size), lambda rank, store=store, n=world_size: reference(store, rank, n))
        made[world_size] = (gloo_mesh(world_size), references)
    yield made
    for transports, _ in made.values():
        for transport in transports:
            transport.close()


@pytest.mark.parametrize("seed", range(36))
def test_ring_agrees_with_gloos_own_collectives(worlds, seed):
    chance = random.Random(seed)
    world_size = chance.choice([2, 3, 4])
    transports, references = worlds[world_size]
    total = chance.choice([1, 17, 1000, 50_000])
    weights = [chance.choice([0, 1, 2, 7]) for _ in range(world_size)]
    chunks = chunk_sizes(total, weights if any(weights) else [1] * world_size)
    dtype = chance.choice([torch.float32, torch.float64, torch.int64])
    segment_bytes = chance.choice([64, 4096, 1 << 20]) if total < 50_000 else 1 << 14
    generator = torch.Generator().manual_seed(seed)
    values = [(torch.randn(total, generator=generator) * 100).to(dtype) for _ in range(world_size)]
    precision = {torch.float32: 1e-5, torch.float64: 1e-12, torch.int64: 0.0}[dtype]

    def compare(transport):
        rank, ring, built_in = transport.rank, Ring(transport, segment_bytes), references[transport.rank]
        start = sum(chunks[:rank])
        mine = slice(start, start + chunks[rank])

        reduced, expected = values[rank].clone(), values[rank].clone()
        ring.all_reduce(reduced, chunks, 3 * seed)
        built_in.allreduce([expected]).wait()
        torch.testing.assert_close(reduced, expected, rtol=precision, atol=precision * 100)

        scattered, own = values[rank].clone(), torch.empty(chunks[rank], dtype=dtype)
        ring.reduce_scatter(scattered, chunks, 3 * seed + 1)
        parts = list(values[rank].clone().split(chunks))
        built_in.reduce_scatter([own], [parts], ReduceScatterOptions()).wait()
        torch.testing.assert_close(scattered[mine], own, rtol=precision, atol=precision * 100)

        gathered = torch.zeros(total, dtype=dtype)
        gathered[mine] = values[rank][mine]
        ring.all_gather(gathered, chunks, 3 * seed + 2)
        whole = [torch.empty(total, dtype=dtype) for _ in range(world_size)]
        built_in.allgather([whole], [values[rank]]).wait()
        assert same_bits(gathered, torch.cat([one.split(chunks)[owner] for owner, one in enumerate(whole)]))
        return reduced

    for reduced in successes(transports, compare):
        assert same_bits(reduced, folded(values, chunks))


def test_a_mixed_sequence_of_calls_stays_in_order(worlds):
    transports, _ = worlds[3]
    wires: list[Wire] = ["fp32", "bf16"]

    def calls(transport):
        ring, results = Ring(transport, 1 << 12), []
        for number in range(40):
            chunks = chunk_sizes(100 + 997 * (number % 5), [1, number % 3, 2])
            flat = torch.full((sum(chunks),), float(number), dtype=[torch.float32, torch.bfloat16][number % 2])
            ring.all_reduce(flat, chunks, number, wires[number // 2 % 2])
            votes = mesh_exchange(transport, torch.tensor([number, transport.rank], dtype=torch.uint8), number)
            results.append((set(flat.tolist()), [vote.tolist() for vote in votes]))
        return results

    for results in successes(transports, calls):
        for number, (values, votes) in enumerate(results):
            assert values == {3.0 * number}
            assert votes == [[number, rank] for rank in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float64])
def test_messages_of_any_dtype_and_shape_arrive(worlds, dtype):
    first, second = worlds[2][0]
    table = torch.arange(12).reshape(3, 4).to(dtype)
    for sent in (table, table.t(), table[:, 1], table[0, 0], table[:0]):
        received = torch.zeros(sent.shape, dtype=dtype)
        strided = torch.zeros(*sent.shape, 2, dtype=dtype)[..., 0]
        for target in (received, strided):
            pending = [second.receive(target, 0, 5), first.send(sent, 1, 5)]
            for message in pending:
                message.wait()
            assert torch.equal(target, sent)


def test_messages_of_one_tag_match_in_order_whichever_end_is_first(worlds):
    first, second = worlds[2][0]
    targets = [torch.zeros(1) for _ in range(6)]
    sends = [first.send(torch.tensor([float(number)]), 1, 2**31 - 2) for number in range(3)]
    receives = [second.receive(target, 0, 2**31 - 2) for target in targets]
    sends += [first.send(torch.tensor([float(number)]), 1, 2**31 - 2) for number in range(3, 6)]
    for message in sends + receives:
        message.wait()
    assert [target.item() for target in targets] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_only_the_chosen_interface_is_bound():
    before = {one.laddr for one in psutil.Process().net_connections("tcp")}
    transports = gloo_mesh(2)
    opened = [one for one in psutil.Process().net_connections("tcp") if one.laddr not in before]
    for transport in transports:
        transport.close()
    assert any(one.status == psutil.CONN_LISTEN for one in opened)
    assert {one.laddr.ip for one in opened} == {"127.0.0.1"}


def test_an_interface_may_be_named():
    store = HashStore()
    for transport in successes(range(2), lambda rank: GlooTransport(store, rank, 2, timeout_s=30, interface="lo")):
        transport.close()


@pytest.mark.parametrize(
    "where", [{}, {"address": "127.0.0.1", "interface": "lo"}, {"address": "192.0.2.1"}, {"interface": "nosuch0"}]
)
def test_a_wrong_interface_is_an_error_that_names_it(where):
    with pytest.raises(LaunchError, match=where.get("interface") or where.get("address") or "address=''"):
        GlooTransport(HashStore(), 0, 1, timeout_s=1, **where)


def test_ranks_that_do_not_come_are_waited_for_as_long_as_promised():
    with pytest.raises(TransportError, match=r"2 ranks did not connect within 0.2 s") as caught:
        GlooTransport(HashStore(), 0, 2, timeout_s=0.2, address="127.0.0.1")
    assert caught.value.timed_out


def test_silence_raises_after_the_timeout_and_ends_this_end_everywhere():
    first, second, third = gloo_mesh(3, timeout_s=0.3)
    other = [None]

    def wait_for_first() -> None:
        other[0] = on_threads([third], lambda end: end.receive(torch.zeros(1), 0, 8).wait())[0]

    pending = first.receive(torch.zeros(1), 1, 7)
    with pytest.raises(TransportError, match="receiving from rank 1") as caught:
        pending.wait()
    assert (caught.value.peer, caught.value.timed_out) == (1, True)
    wait_for_first()
    assert isinstance(other[0], TransportError)
    assert not other[0].timed_out  # Told, not timed out itself: its own 0.3 s had only begun.
    with pytest.raises(TransportError):
        second.send(torch.zeros(1), 0, 7).wait()


def test_close_wakes_waits_on_both_sides():
    first, second, third = gloo_mesh(3)
    waits = [
        first.receive(torch.zeros(1), 1, 7),
        second.receive(torch.zeros(1), 0, 7),
        third.receive(torch.zeros(1), 0, 7),
    ]
    closer = threading.Timer(0.1, first.close)
    started = time.monotonic()
    closer.start()
    errors = on_threads(waits, lambda pending: pending.wait())
    assert time.monotonic() - started < AT_ONCE_S
    assert [error.peer for error in errors] == [1, 0, 0]
    assert not any(error.timed_out for error in errors)
    with pytest.raises(TransportError, match="closed"):
        first.send(torch.zeros(1), 1, 7)
    first.close()


def test_a_dropped_transport_closes_its_connections_once_no_message_is_left():
    first, second = gloo_mesh(2)
    waiting = first.receive(torch.zeros(1), 1, 7)
    unfinished = second.receive(torch.zeros(1), 0, 7)
    del second
    gc.collect()
    first.send(torch.zeros(1), 1, 7).wait()  # Still answered by what the message keeps alive.
    unfinished.wait()
    del unfinished
    gc.collect()
    with pytest.raises(TransportError, match="losed by peer") as caught:
        waiting.wait()
    assert not caught.value.timed_out


def test_a_dropped_send_is_lost():
    first, second = gloo_mesh(2, timeout_s=0.3)
    first.send(torch.zeros(1 << 16), 1, 7)
    gc.collect()
    with pytest.raises(TransportError) as caught:
        second.receive(torch.zeros(1 << 16), 0, 7).wait()
    assert caught.value.timed_out


def in_process(function, *args) -> BaseProcess:
    """Fork: the child starts with torch imported, opens its own sockets and never returns into pytest."""

    def run() -> None:
        torch.set_num_threads(1)
        try:
            function(*args)
        except TransportError:
            os._exit(3)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


def ring_until(port: int, rank: int, last_call: int, fate: int | None, timeout_s: float) -> None:
    """All-reduce for ever; in call `last_call` this rank meets its fate, a signal."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    transport = GlooTransport(store, rank, 3, timeout_s=timeout_s, address="127.0.0.1")
    ring = Ring(transport)
    try:
        for call in range(1_000_000):
            if fate is not None and call == last_call:
                os.kill(os.getpid(), fate)
            ring.all_reduce(torch.ones(999), [333] * 3, call)
    finally:
        transport.close()


@pytest.mark.parametrize(("fate", "timeout_s"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 1.0)])
def test_a_peer_that_dies_or_freezes_ends_everybodys_wait_in_time(fate, timeout_s):
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    victim = in_process(ring_until, store.port, 1, 5, fate, timeout_s)
    bystander = in_process(ring_until, store.port, 2, 5, None, timeout_s)
    try:
        transport = GlooTransport(store, 0, 3, timeout_s=timeout_s, address="127.0.0.1")
        ring, calls, last_call_began = Ring(transport), 0, time.monotonic()
        with pytest.raises(TransportError) as caught:
            for calls in range(1_000_000):
                last_call_began = time.monotonic()
                ring.all_reduce(torch.ones(999), [333] * 3, calls)
        assert time.monotonic() - last_call_began < AT_ONCE_S
        assert calls == 5
        # On a busy machine the bystander may be the first to give up, which closes its connection with this rank.
        assert caught.value.timed_out or fate == signal.SIGKILL or caught.value.peer == 2
        transport.close()
        bystander.join(AT_ONCE_S)
        assert bystander.exitcode == 3
    finally:
        for process in (victim, bystander):
            process.kill()
            process.join(10)


def test_a_message_larger_than_its_receive_ends_the_process():
    def receive_too_little() -> None:
        faulthandler.disable()  # The crash is wanted: keep its trace out of the test report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        first, second = gloo_mesh(2, timeout_s=5)
        pending = [second.receive(torch.zeros(4), 0, 7), first.send(torch.zeros(8), 1, 7)]
        for message in pending:
            message.wait()

    process = in_process(receive_too_little)
    process.join(20)
    assert process.exitcode == -signal.SIGABRT
