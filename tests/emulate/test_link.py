import multiprocessing
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm.ring import Ring
from ragtag.comm.transport import LocalTransport, TransportError
from ragtag.core.cluster import Link
from ragtag.emulate.link import LimitedTransport, queues_to_peers
from ragtag.emulate.link_queue import LocalQueue, SharedQueue, crossing

LINK = Link(between=("a", "b"), bandwidth_bytes_per_s=1e6, latency_s=0.02)
messages = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**7)), min_size=1, max_size=20)


def test_a_message_alone_takes_bytes_over_bandwidth_and_latency():
    assert LocalQueue(LINK).reserve(5.0, 100_000) == pytest.approx(5.12)


def test_messages_queue_behind_one_another_and_share_the_latency():
    queue = LocalQueue(LINK)
    assert [queue.reserve(5.0, 100_000) for _ in range(3)] == pytest.approx([5.12, 5.22, 5.32])
    assert queue.reserve(9.0, 100_000) == pytest.approx(9.12)


def test_latency_without_a_bandwidth_delays_only():
    queue = LocalQueue(Link(between=("a", "b"), latency_s=0.02))
    assert [queue.reserve(1.0, 10**9) for _ in range(2)] == [1.02, 1.02]


@given(messages)
def test_a_link_never_carries_more_than_its_bandwidth(posted):
    posted.sort()
    busy_s, arrivals = float("-inf"), []
    for now_s, num_bytes in posted:
        busy_s, arrival_s = crossing(LINK, now_s=now_s, busy_until_s=busy_s, num_bytes=num_bytes)
        arrivals.append(arrival_s)
        assert arrival_s >= now_s + num_bytes / 1e6 + 0.02 - 1e-9
    assert arrivals == sorted(arrivals)
    for first in range(len(posted)):
        num_bytes = sum(size for _, size in posted[first:])
        assert arrivals[-1] >= posted[first][0] + num_bytes / 1e6 + 0.02 - 1e-6


@given(messages)
def test_a_shared_queue_is_the_same_queue(tmp_path_factory, posted):
    file = tmp_path_factory.mktemp("link") / "queue"
    ends = [SharedQueue(LINK, file), SharedQueue(LINK, file)]
    local = LocalQueue(LINK)
    posted.sort()
    for number, (now_s, num_bytes) in enumerate(posted):
        assert ends[number % 2].reserve(now_s, num_bytes) == pytest.approx(local.reserve(now_s, num_bytes))
    for end in ends:
        end.close()


def _reserve_many(file, now_s, answer):
    queue = SharedQueue(LINK, file)
    answer.put([queue.reserve(now_s, 1000) for _ in range(50)])


def test_processes_share_a_link(tmp_path):
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    processes = [context.Process(target=_reserve_many, args=(tmp_path / "queue", 5.0, answer)) for _ in range(2)]
    for process in processes:
        process.start()
    arrivals = sorted(arrival for _ in processes for arrival in answer.get(timeout=60))
    for process in processes:
        process.join(60)
    assert arrivals == pytest.approx([5.02 + 0.001 * (number + 1) for number in range(100)])


def test_a_time_far_ahead_is_not_trusted(tmp_path):
    file = tmp_path / "queue"
    ahead = SharedQueue(LINK, file)
    ahead.reserve(1e9, 1)
    assert ahead.reserve(5.0, 0) == pytest.approx(5.02)
    ahead.close()


def limited_pair(link):
    ends = LocalTransport.mesh(2)
    return LimitedTransport(ends[0], {1: LocalQueue(link)}), ends[1]


def test_messages_arrive_late_in_order_and_whole():
    sender, receiver = limited_pair(LINK)
    started_s = time.monotonic()
    sent = [sender.send(torch.full((5000,), float(number)), 1, tag=3) for number in range(4)]
    targets = [torch.zeros(5000) for _ in range(4)]
    received = [receiver.receive(target, 0, tag=3) for target in targets]
    arrivals = []
    for pending in received:
        pending.wait()
        arrivals.append(time.monotonic() - started_s)
    for pending in sent:
        pending.wait()
    assert [target[0].item() for target in targets] == [0, 1, 2, 3]
    assert all(arrival_s >= 0.02 * (number + 1) + 0.02 for number, arrival_s in enumerate(arrivals))
    sender.close()


def test_peers_without_a_link_are_not_delayed():
    ends = LocalTransport.mesh(2)
    sender = LimitedTransport(ends[0], {})
    assert (sender.rank, sender.world_size) == (0, 2)
    target = torch.zeros(3)
    received = ends[1].receive(target, 0, tag=1)
    sender.send(torch.ones(3), 1, tag=1).wait()
    received.wait()
    assert target.tolist() == [1, 1, 1]
    back = sender.receive(target, 1, tag=2)
    ends[1].send(torch.zeros(3), 0, tag=2).wait()
    back.wait()
    assert target.tolist() == [0, 0, 0]
    sender.close()


def test_close_fails_what_is_still_on_the_link_at_once():
    sender, receiver = limited_pair(Link(between=("a", "b"), latency_s=3600))
    sent = sender.send(torch.ones(3), 1, tag=1)
    received = receiver.receive(torch.zeros(3), 0, tag=1)
    sender.close()
    with pytest.raises(TransportError):
        sent.wait()
    with pytest.raises(TransportError):
        received.wait()
    with pytest.raises(TransportError):
        sender.send(torch.ones(3), 1, tag=1).wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "ragtag-emulated-link"]


def test_a_ring_over_limited_links_gives_the_same_sum():
    hosts = ("a", "b", "a")
    ends = LocalTransport.mesh(3)
    link = Link(between=("a", "b"), bandwidth_bytes_per_s=1e7, latency_s=0.001)
    transports = []
    for rank, end in enumerate(ends):
        between = lambda one, other: link  # noqa: E731
        transports.append(
            LimitedTransport(end, queues_to_peers(hosts, rank, between, lambda link, _: LocalQueue(link)))
        )
    flats = [torch.full((3000,), float(rank)) for rank in range(3)]

    def reduce(rank):
        Ring(transports[rank]).all_reduce(flats[rank], [1000] * 3, tag=1)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(flat.tolist() == [3.0] * 3000 for flat in flats)
    for transport in transports:
        transport.close()


def test_ranks_on_one_host_share_the_queue_and_need_none_among_themselves():
    made = []

    def make(link, host):
        made.append(host)
        return LocalQueue(link)

    hosts = ("a", "a", "b", "b", "c")
    queues = queues_to_peers(hosts, 0, lambda one, other: LINK if "c" not in (one, other) else None, make)
    assert sorted(queues) == [2, 3]
    assert queues[2] is queues[3]
    assert made == ["b"]
