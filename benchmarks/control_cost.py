"""What the step's control costs (ledger, timings, vote, replica hash, following speeds) beside a bare loop.

    scripts/bench control_cost [--workers 4] [--rounds 15] [--steps 20] [--compute-ms 50] [--pinned] [--json]

Compute is a sleep, so that four ranks fit on two cores and only ragtag's own work shows. The bare loop reads the same
samples through the same loader, sleeps as long, reduces the same bytes over the same ring and steps the same optimizer.
Blocks alternate; the figure is the median over rounds of the difference, as a share of the bare step. Replicas are
hashed every 20 steps here, five times as often as by default.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch.utils.data import TensorDataset

import ragtag


class Sleeper(torch.nn.Module):
    """Takes a fixed wall time for forward; a small weight so that the reduction is short."""

    def __init__(self, compute_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(10_000))
        self.compute_s = compute_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.compute_s)
        return (x * self.weight.mean()).mean()


def mean(model, batch):
    return model(batch[0])


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = Sleeper(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.zeros(4096, 4))
    config = ragtag.Config(check_replicas_every=20)
    world_size = int(os.environ["WORLD_SIZE"])
    shares = (1,) * world_size if arguments.pinned else None
    trainer = ragtag.Trainer(
        model, optimizer, mean, dataset, global_batch_size=world_size, shares=shares, config=config
    )
    group = trainer._group
    model.compute_s = arguments.compute_ms / 1e3
    loader = trainer._run.make_loader(dataset)
    flat = torch.zeros(10_000)
    numbers = itertools.count()

    def bare() -> float:
        group.barrier("benchmark")
        started = time.perf_counter()
        for _ in range(arguments.steps):
            number = next(numbers)
            loader.request((number, 0), 0, (number % len(dataset),))
            optimizer.zero_grad()
            mean(model, loader.take([(number, 0)])).backward()
            flat.copy_(model.weight.grad)
            group.wait(group.all_reduce(flat), "benchmark")
            model.weight.grad.copy_(flat)
            optimizer.step()
        group.barrier("benchmark")
        return (time.perf_counter() - started) / arguments.steps

    def full() -> float:
        group.barrier("benchmark")
        started = time.perf_counter()
        for _ in trainer.steps(arguments.steps):
            pass
        group.barrier("benchmark")
        return (time.perf_counter() - started) / arguments.steps

    bare(), full()  # warm-up
    pairs = [(bare(), full()) for _ in range(arguments.rounds)]
    if trainer.rank == 0:
        row = {"workers": world_size, "pinned": arguments.pinned, **compared("bare", "ragtag", pairs)}
        if arguments.json:
            print(json.dumps(row))
        else:
            print(
                f"{world_size} workers: bare step {row['bare_step_ms']} ms, ragtag {row['ragtag_step_ms']} ms, control "
                f"costs {100 * row['cost_median']:.2f} % ({100 * row['cost_min']:.2f} to {100 * row['cost_max']:.2f} %)"
            )
    trainer.close()


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """What both benchmarks of sleeping steps ask for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    return parser


def compared(first: str, second: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Step times of two ways, in pairs of seconds, and what the second costs more, as a part of the first."""
    costs = [(b - a) / a for a, b in pairs]
    return {
        f"{first}_step_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 2),
        f"{second}_step_ms": round(statistics.median(b for _, b in pairs) * 1e3, 2),
        "cost_median": round(statistics.median(costs), 4),
        "cost_min": round(min(costs), 4),
        "cost_max": round(max(costs), 4),
        "rounds": len(pairs),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--pinned", action="store_true", help="pin the shares: timings, vote and hash, no following of speeds"
    )
    arguments = parser.parse_args()
    if "RAGTAG_LAUNCHED" in os.environ:
        worker(arguments)
        return
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
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    raise SystemExit(subprocess.run([*launch, __file__, *sys.argv[1:]], env=environ).returncode)


if __name__ == "__main__":
    main()
