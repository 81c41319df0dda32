"""torchft's DiLoCo on the study's model and data: four replica groups of one process each, as it treats any devices.

    python -m unequal.torchft_diloco --seed 0 --rate 1e-3 --sequences 16000 --start warm.pt     # in benchmarks/

Unpaced; prints the held-out loss of the values after the last synchronisation as JSON. Every group has a quarter of the
batch, outer optimizer and H are those of its own documentation: Nesterov's momentum 0.9 at a rate of 0.7.
"""

import argparse
import json
import multiprocessing
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unequal.sites import BATCH, Data, Replica

INNER_STEPS = 100
NUM_GROUPS = 4
_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=120)


def group(number: int, lighthouse: str, arguments: argparse.Namespace, results: "multiprocessing.Queue[float]") -> None:
    """Train as one replica group."""
    import torchft  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    data = Data()
    replica = Replica(data, arguments.seed, arguments.rate, arguments.start, arguments.sequences)
    replica.take = data.stream(1000 * arguments.seed + 100 + number)
    model, inner = replica.model, replica.optimizer
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(_PATIENCE),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=NUM_GROUPS,
        use_async_quorum=False,
        replica_id=f"group{number}_",
        store_addr=_HOST,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname=_HOST,
        init_sync=False,
        timeout=_PATIENCE,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=INNER_STEPS, pin_memory=False):
        for done in range(0, arguments.sequences, BATCH):
            replica.train(BATCH // NUM_GROUPS, done)
    if manager.current_step() != arguments.sequences // BATCH // INNER_STEPS:
        raise SystemExit(f"torchft discarded synchronisations on group {number}: {manager.errored()}")
    results.put(data.loss(model))
    manager.shutdown(wait=False)


def main() -> None:
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--sequences", type=int, default=16000)
    parser.add_argument("--start", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    lighthouse = LighthouseServer(
        bind=f"{_HOST}:0", min_replicas=NUM_GROUPS, join_timeout_ms=120_000, quorum_tick_ms=20
    )
    address = lighthouse.address().replace(socket.gethostname(), _HOST)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=group, args=(number, address, arguments, results)) for number in range(NUM_GROUPS)
    ]
    for process in processes:
        process.start()
    losses = [results.get(timeout=900) for _ in processes]
    for process in processes:
        process.join(60)
    lighthouse.shutdown()
    assert max(losses) - min(losses) < 1e-5, "replica groups ended with different values"
    print(json.dumps({"loss": losses[0]}))


if __name__ == "__main__":
    main()
