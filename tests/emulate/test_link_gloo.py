"""Limited links over the real transport, where sends are posted from the link's own thread."""

import os
import time

import torch
from torch.distributed import PrefixStore, TCPStore

from ragtag.comm.gloo import GlooTransport
from ragtag.comm.ring import Ring
from ragtag.core.cluster import Link
from ragtag.emulate.link import LimitedTransport
from ragtag.emulate.link_queue import LocalQueue
from tests.ranks import run_ranks

LINK = Link(between=("a", "b"), bandwidth_bytes_per_s=1e7, latency_s=0.01)
NUM_ELEMENTS = 200_000


def _reduce_over_links() -> tuple[float, float, float]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = int(os.environ["RAGTAG_STORE_FD"]) if rank == 0 else None
    store = TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        master_listen_fd=shared,
        wait_for_workers=False,
    )
    inner = GlooTransport(PrefixStore("data", store), rank, world_size, timeout_s=20, address="127.0.0.1")
    queues = {peer: LocalQueue(LINK) for peer in range(world_size) if peer != rank}
    transport = LimitedTransport(inner, queues)
    ring = Ring(transport)
    chunks = [NUM_ELEMENTS // world_size] * world_size
    flat = torch.full((NUM_ELEMENTS,), float(rank + 1))
    started_s = time.perf_counter()
    ring.all_reduce(flat, chunks, tag=1)
    took_s = time.perf_counter() - started_s
    done = torch.zeros(1)
    ring.all_reduce(done, [1, *[0] * (world_size - 1)], tag=2)  # nobody leaves while another still receives
    transport.close()
    return flat.min().item(), flat.max().item(), took_s


def test_a_ring_over_gloo_takes_what_its_links_take():
    for least, most, took_s in run_ranks(2, _reduce_over_links):
        assert least == most == 3
        # Each end sends the whole tensor's bytes (half to add up, half to spread), over two hops' latency.
        assert took_s >= 4 * NUM_ELEMENTS / 1e7 + 0.02 - 1e-3
