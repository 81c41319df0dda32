"""How many steps shares need to follow speed: real processes that sleep 1 ms and 4 ms a sample, global batch 50.

    scripts/bench following
    scripts/bench following --rounds 5 --json

Three phases of one run: from equal shares to 40/10; the slow rank becomes as fast as the other, to 25/25; both as at
the start again and then the fast rank's memory holds only 30 samples, to 30/20. Reported for each phase: the shares it
ended with, and after how many steps they were within 2 of those expected. Work is not pulled: these are the planned
shares.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import msgspec
import torch

import ragtag

BATCH, STEPS = 50, 12
PHASES = (("1 ms and 4 ms a sample", (40, 10)), ("both 1 ms", (25, 25)), ("1 ms and 4 ms, at most 30", (30, 20)))


def run_once() -> list[list[tuple[int, ...]]]:
    """The shares of every step, by phase."""
    rank = int(os.environ["RANK"])
    slow_s = [0.004]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))

    def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep((slow_s[0] if rank else 0.001) * len(batch[0]))
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = ragtag.Config(pull=False)
    with ragtag.Trainer(model, optimizer, loss_fn, data, global_batch_size=BATCH, config=config) as trainer:
        seen = [[report.shares for report in trainer.steps(STEPS)]]
        slow_s[0] = 0.001
        seen.append([report.shares for report in trainer.steps(STEPS)])
        slow_s[0] = 0.004
        list(trainer.steps(STEPS))
        controller = trainer._run.controller
        assert controller is not None
        # What an out-of-memory error on rank 0 will do.
        controller.limits = msgspec.structs.replace(controller.limits, caps=(30, None))
        seen.append([report.shares for report in trainer.steps(STEPS)])
    return seen


def steps_until(shares: list[tuple[int, ...]], expected: tuple[int, ...]) -> int:
    """After how many steps all later shares were within 2 of those expected; more than there are: never."""
    near = [all(abs(has - wants) <= 2 for has, wants in zip(step, expected)) for step in shares]
    return len(near) - next((index for index, fine in enumerate(reversed(near)) if not fine), len(near))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        seen = run_once()
        if os.environ["RANK"] == "0":
            print(json.dumps(seen), flush=True)
        return
    launch = [
        sys.executable,
        "-m",
        "ragtag.cli.main",
        "launch",
        "--fixed",
        "--no-page",
        "--local",
        "2",
        __file__,
        "--worker",
    ]
    runs = []
    for _ in range(arguments.rounds):
        done = subprocess.run(
            launch, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for index, (what, expected) in enumerate(PHASES):
        needed = [steps_until(run[index], expected) for run in runs]
        rows.append(
            {
                "phase": what,
                "expected": expected,
                "ended_with": [run[index][-1] for run in runs],
                "steps": statistics.median(needed),
                "most_steps": max(needed),
                "target": 5,
            }
        )
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['phase']}: {row['steps']:g} steps (at most {row['most_steps']}); ended with {row['ended_with']}")


if __name__ == "__main__":
    main()
