"""Equal devices, equal shares: samples/s of ragtag against stock DistributedDataParallel, side by side in the same
processes.

    scripts/bench equal_devices [--workers 3] [--rounds 7] [--steps 12] [--json]

Each worker holds both a DDP copy and a ragtag copy of the demo's model and trains them in alternating blocks of steps,
so that whatever else the machine does falls on both. The figure is the median over rounds of (DDP seconds / ragtag
seconds).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ragtag
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn

SHARE = 8


def ddp_blocks(dataset, steps: int):
    """Yield the seconds of one block of stock DDP steps at a time, for ever."""
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset, shuffle=True)
    batches = iter(DataLoader(dataset, batch_size=SHARE, sampler=sampler))
    while True:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        dist.barrier()
        yield time.perf_counter() - started


def ragtag_blocks(dataset, steps: int):
    """The same with ragtag."""
    torch.manual_seed(0)
    model = ByteGPT()
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn,
        dataset,
        global_batch_size=SHARE * dist.get_world_size(),
    )
    while True:
        dist.barrier()
        started = time.perf_counter()
        for _ in trainer.steps(steps):
            pass
        dist.barrier()
        yield time.perf_counter() - started


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=world_size)
    dataset = StandardLibrary()
    stock, ours = ddp_blocks(dataset, arguments.steps), ragtag_blocks(dataset, arguments.steps)
    next(stock), next(ours)  # warm-up
    seconds = [(next(stock), next(ours)) for _ in range(arguments.rounds)]
    if rank == 0:
        samples = SHARE * world_size * arguments.steps
        ratios = [a / b for a, b in seconds]
        row = {
            "workers": world_size,
            "samples_per_step": SHARE * world_size,
            "ddp_samples_per_s": round(samples / statistics.median(a for a, _ in seconds), 1),
            "ragtag_samples_per_s": round(samples / statistics.median(b for _, b in seconds), 1),
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "rounds": arguments.rounds,
        }
        if arguments.json:
            print(json.dumps(row))
        else:
            print(
                f"{world_size} workers, {SHARE} samples each: DDP {row['ddp_samples_per_s']} samples/s, ragtag "
                f"{row['ragtag_samples_per_s']} samples/s, ratio {row['ratio_median']} "
                f"({row['ratio_min']}-{row['ratio_max']}) over {arguments.rounds} rounds"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meeting:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        launch = [
            sys.executable,
            "-m",
            "ragtag.cli.main",
            "launch",
            "--fixed",
            "--no-page",
            "--local",
            str(arguments.workers),
        ]
        command = [*launch, __file__, *sys.argv[1:], "--meeting", os.path.join(directory, "meeting")]
        raise SystemExit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
