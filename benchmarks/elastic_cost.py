"""What it costs, step by step, that ranks may come and go: an elastic run beside the same run with fixed membership.

    scripts/bench elastic_cost [--workers 4] [--rounds 15] [--steps 20] [--compute-ms 50] [--json]

Compute is a sleep, so that four ranks fit on two cores. Blocks of steps alternate in one run under a real hub, with the
vote that makes a lost rank harmless and without it; heartbeats and the hub run in both, and the CPU time that they take
is shown beside.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from control_cost import Sleeper, compared, mean, parser_of
from torch.utils.data import TensorDataset

import ragtag


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = Sleeper(0.0)
    world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = ragtag.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        mean,
        TensorDataset(torch.zeros(4096, 4)),
        global_batch_size=world_size,
        shares=(1,) * world_size,
    )
    group = trainer._group
    assert group.elastic, "the run is not elastic"
    assert group.world_size == world_size, "a worker is missing"
    model.compute_s = arguments.compute_ms / 1e3

    def block(elastic: bool) -> float:
        group.elastic = elastic
        group.barrier("benchmark")
        started = time.perf_counter()
        for _ in trainer.steps(arguments.steps):
            pass
        group.barrier("benchmark")
        return (time.perf_counter() - started) / arguments.steps

    block(True), block(False)  # warm-up
    pairs = []
    for number in range(arguments.rounds):
        order = (True, False) if number % 2 else (False, True)
        times = {elastic: block(elastic) for elastic in order}
        pairs.append((times[False], times[True]))
    if trainer.rank == 0:
        row = {"workers": world_size, **compared("fixed", "elastic", pairs), "target": 0.03}
        if arguments.json:
            print(json.dumps(row))
        else:
            print(
                f"{world_size} workers: fixed step {row['fixed_step_ms']} ms, elastic {row['elastic_step_ms']} ms: "
                f"{100 * row['cost_median']:.2f} % ({100 * row['cost_min']:.2f} to {100 * row['cost_max']:.2f} %), "
                f"target 3 %"
            )
    group.elastic = True
    trainer.close()


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    if "RAGTAG_LAUNCHED" in os.environ:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        launch = [sys.executable, "-m", "ragtag.cli.main", "launch", "--elastic", "--run-dir", directory]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*launch, "--local", str(arguments.workers), __file__, *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environ).returncode)


if __name__ == "__main__":
    main()
