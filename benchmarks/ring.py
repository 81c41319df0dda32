#!/usr/bin/env python
"""Ring all-reduce against gloo's built-in one, alternating in the same processes.

    scripts/bench ring                                     # 3 processes over loopback
    scripts/bench ring --link 1gbit                    # through network namespaces (scripts/netns; needs root)
    scripts/bench ring --segments 65536,262144,1048576 # compare message sizes

A time is the slowest rank's, from a common start; reported are medians, and the ratio of each ring run to the
gloo run beside it: median (least - greatest).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NAMESPACE = f"bench{os.getpid() % 1000}"


def main() -> int:
    options = parse()
    if options.rank is not None:
        run_rank(options)
        return 0
    addresses = ["127.0.0.1"] * options.ranks
    prefixes: list[list[str]] = [[] for _ in addresses]
    if options.link:
        addresses = [f"10.99.7.{10 + rank}" for rank in range(options.ranks)]
        prefixes = [["ip", "netns", "exec", f"{NAMESPACE}{rank}"] for rank in range(options.ranks)]
        subprocess.run([SCRIPTS / "netns", "up", str(options.ranks), options.link, NAMESPACE], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen] = []
    try:
        for rank, (prefix, address) in enumerate(zip(prefixes, addresses)):
            place = ["--rank", str(rank), "--address", address, "--store", f"{addresses[0]}:{port}"]
            command = [*prefix, sys.executable, __file__, *sys.argv[1:], *place]
            environment = {"PYTHONPATH": str(SCRIPTS.parent / "src"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
        return max(abs(process.wait(timeout=options.limit)) for process in processes)
    finally:
        for process in processes:
            process.kill()
        if options.link:
            subprocess.run([SCRIPTS / "netns", "down", str(options.ranks), NAMESPACE], check=True)


def numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="number of processes (3)")
    parser.add_argument(
        "--sizes", default=[1_400_000, 3_000_000, 30_000_000], help="floats: 1.4e6,3e6,30e6", type=numbers
    )
    parser.add_argument("--segments", default=None, help="bytes per message, several to compare", type=numbers)
    parser.add_argument(
        "--weights", default=None, help="chunk sizes in proportion to these, one per rank (equal)", type=numbers
    )
    parser.add_argument("--repeats", type=int, default=15, help="alternating runs of each kind (15)")
    parser.add_argument("--link", default="", help="tbf rate, such as 1gbit; empty: loopback")
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32", help="what the ring sends (fp32)")
    parser.add_argument("--limit", type=float, default=900, help="seconds before everything is killed (900)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    for hidden in ("--rank", "--address", "--store"):
        parser.add_argument(hidden, type=int if hidden == "--rank" else str, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_rank(options: argparse.Namespace) -> None:
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    from ragtag.comm.gloo import GlooTransport
    from ragtag.comm.ring import SEGMENT_BYTES, Ring, mesh_exchange
    from ragtag.core.chunks import chunk_sizes

    torch.set_num_threads(1)
    rank, world_size = options.rank, options.ranks
    host, port = options.store.rsplit(":", 1)
    patience = timedelta(seconds=60)
    store = TCPStore(host, int(port), world_size, rank == 0, patience)
    transport = GlooTransport(PrefixStore("ring", store), rank, world_size, timeout_s=60, address=options.address)
    built_in: Any = ProcessGroupGloo
    gloo_options = built_in._Options()
    gloo_options._timeout = patience
    gloo_options._devices = [built_in.create_device(hostname=options.address, lazy_init=False)]
    gloo = built_in(PrefixStore("gloo", store), rank, world_size, gloo_options)
    segments = options.segments or [SEGMENT_BYTES]
    rings = {segment: Ring(transport, segment) for segment in segments}
    calls = 0

    def slowest(seconds: float) -> float:
        nonlocal calls
        calls += 1
        everyone = mesh_exchange(transport, torch.tensor([seconds], dtype=torch.float64).view(torch.uint8), calls)
        return max(one.view(torch.float64).item() for one in everyone)

    def timed(call) -> float:
        slowest(0.0)
        started = time.perf_counter()
        call()
        return slowest(time.perf_counter() - started)

    results = []
    for size in options.sizes:
        chunks = chunk_sizes(size, options.weights or [1] * world_size)
        values = torch.ones(size)
        tag = 0

        def reduce_ring(segment: int, values=values, chunks=chunks) -> None:
            nonlocal tag
            tag += 1
            rings[segment].all_reduce(values, chunks, tag, options.wire)

        def reduce_gloo(values=values) -> None:
            gloo.allreduce([values]).wait()

        times: dict[int, list[float]] = {segment: [] for segment in segments}
        gloo_times: list[float] = []
        for repeat in range(-2, options.repeats):
            values.fill_(1.0)
            gloo_s = timed(reduce_gloo)
            for segment in segments:
                values.fill_(1.0)
                ring_s = timed(lambda segment=segment: reduce_ring(segment))
                assert values[0] == values[-1] == world_size
                if repeat >= 0:
                    times[segment].append(ring_s)
            if repeat >= 0:
                gloo_times.append(gloo_s)
        for segment in segments:
            ratios = [ring_s / gloo_s for ring_s, gloo_s in zip(times[segment], gloo_times)]
            results.append(
                {
                    "floats": size,
                    "segment_bytes": segment,
                    "gloo_s": median(gloo_times),
                    "ring_s": median(times[segment]),
                    "ratio_of_medians": median(times[segment]) / median(gloo_times),
                    "ratio": median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                }
            )
    if rank == 0:
        report(results, options)
    slowest(0.0)
    transport.close()
    if rank == 0:
        time.sleep(0.2)  # The store's host leaves last.


def report(results: list[dict], options: argparse.Namespace) -> None:
    link = options.link or "loopback"
    if options.json:
        facts = {"ranks": options.ranks, "link": link, "wire": options.wire, "repeats": options.repeats}
        print(json.dumps({**facts, "load": os.getloadavg()[0], "cores": os.cpu_count(), "results": results}))
        return
    print(
        f"{options.ranks} ranks, {link}, wire {options.wire}, {options.repeats} alternating runs, load",
        os.getloadavg()[0],
    )
    for row in results:
        print(
            f"{row['floats']:>11,} floats  {row['segment_bytes'] >> 10:>5} KiB  gloo {row['gloo_s'] * 1e3:7.1f} ms"
            f"  ring {row['ring_s'] * 1e3:7.1f} ms  of medians {row['ratio_of_medians']:.2f}"
            f"  ratio {row['ratio']:.2f} ({row['ratio_min']:.2f} - {row['ratio_max']:.2f})"
        )


if __name__ == "__main__":
    sys.exit(main())
