"""What it costs to be watched: processor time of everything that only serves the event log, over the run's time.

    scripts/bench watching [--workers 4] [--steps 200] [--compute-ms 50] [--json]

One run with a log. Counted: the thread that writes it, the calls that hand it events, and the thread that reads the
devices' vitals, on the first rank, which does most. Processor time is by thread, so other work on the machine does not
count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

TARGET = 0.005


def worker(arguments: argparse.Namespace) -> None:
    import torch
    from torch.utils.data import TensorDataset

    import ragtag

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 64))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))

    def loss_fn(model: Any, batch: Any) -> Any:
        time.sleep(arguments.compute_ms / 1e3 / 4)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    size = 4 * 4 * arguments.workers
    config = ragtag.Config(micro_batch=4)
    trainer = ragtag.Trainer(model, optimizer, loss_fn, data, global_batch_size=size, config=config)
    recorder: Any = trainer._run.recorder
    spent_s = 0.0
    told = recorder.step

    def step(*values: Any) -> None:
        nonlocal spent_s
        began_s = time.thread_time()
        told(*values)
        spent_s += time.thread_time() - began_s

    recorder.step = step
    threads_before = _cpu_by_thread()
    began_s = time.perf_counter()
    for _ in trainer.steps(arguments.steps):
        pass
    wall_s = time.perf_counter() - began_s
    watching = {
        name: seconds - threads_before.get(name, 0.0)
        for name, seconds in _cpu_by_thread().items()
        if name in ("ragtag-log", "ragtag-vitals")
    }
    if trainer.rank == 0:
        cost = (spent_s + sum(watching.values())) / wall_s
        row = {
            "workers": trainer.world_size,
            "steps": arguments.steps,
            "step_ms": round(1e3 * wall_s / arguments.steps, 2),
            "calls_us_a_step": round(1e6 * spent_s / arguments.steps, 1),
            **{f"{name.removeprefix('ragtag-')}_thread_cost": round(s / wall_s, 6) for name, s in watching.items()},
            "cost": round(cost, 5),
            "target": TARGET,
        }
        print(json.dumps(row) if arguments.json else f"{100 * cost:.3f} % of the run's time: {row}", flush=True)
    trainer.close()


def _cpu_by_thread() -> dict[str, float]:
    """Processor seconds by thread of this process that has a name of ours."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for thread in threading.enumerate():
        try:
            with open(f"/proc/self/task/{thread.native_id}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
            exact_s = int(file.read().split()[0]) / 1e9
        found[thread.name] = exact_s or (int(fields[11]) + int(fields[12])) / ticks
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "RAGTAG_LAUNCHED" in os.environ:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        launch = [sys.executable, "-m", "ragtag.cli.main", "launch", "--quiet", "--run-dir", directory]
        command = [*launch, "--local", str(arguments.workers), __file__, *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
