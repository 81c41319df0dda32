"""What the outer loop takes of an island's compute time: two islands of one worker each on this machine, nothing paced.

    scripts/bench islands_cost [--steps 200] [--inner-steps 10] [--json]

Counted are the processor time of the thread that talks to the hub (encoding, decoding, sending) and the time that the
training thread spends on snapshots, arrivals and questions, over the time of all steps in which both islands train. H
is pinned to the fewest steps that there are, where the outer loop is dearest.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ragtag
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn
from ragtag.runtime.islands import boundary
from ragtag.runtime.islands.taking_part import TakingPart

RAGTAG = Path(sys.executable).with_name("ragtag")
ADDRESS = "127.0.0.1"
LIMIT_S = 500
WARM_UP = 10


class Counted:
    """Time spent in some functions by the training thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, name: str) -> None:
        """Count a function of a class or module from now on."""
        inner: Callable[..., Any] = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began_s

        setattr(owner, name, counted)


def thread_seconds(name: str) -> float:
    """Processor time of this process's threads of that name."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for thread in threading.enumerate():
        if thread.name == name:
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counted = Counted()
    counted.around(boundary, "between_steps")
    counted.around(TakingPart, "asks")
    counted.around(TakingPart, "stepped")
    model = ByteGPT(width=arguments.width, num_layers=arguments.layers, context=64)
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        loss_fn,
        StandardLibrary(context=64),
        global_batch_size=arguments.batch,
        config=ragtag.Config(inner_steps=arguments.inner_steps, warm_up_steps=WARM_UP, patience_s=60.0),
    )
    began: tuple[float, float, float, int] | None = None
    last = time.perf_counter()
    walls: list[float] = []
    ended = (last, 0.0, 0.0, 0)
    for report in trainer.steps(arguments.steps):
        now = time.perf_counter()
        if began is None and report.number > WARM_UP + 3 * arguments.inner_steps and thread_seconds("ragtag-outer"):
            began = now, counted.seconds, thread_seconds("ragtag-outer"), report.number
        elif began is not None:
            walls.append(now - last)
        last = now
        ended = now, counted.seconds, thread_seconds("ragtag-outer"), report.number
    assert began is not None, "the islands did not train together: more --steps"
    wall_s, training_s, client_s = (ended[number] - began[number] for number in range(3))
    row = {
        "site": os.environ.get("RAGTAG_ISLAND", ""),
        "parameters": sum(each.numel() for each in model.parameters()),
        "steps": ended[3] - began[3],
        "step_s": statistics.median(walls),
        "training_thread": training_s / wall_s,
        "client_thread": client_s / wall_s,
        "cost": (training_s + client_s) / wall_s,
    }
    print("ROW " + json.dumps(row), flush=True)
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, of both islands together")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    with socket.socket() as free:
        free.bind((ADDRESS, 0))
        port = free.getsockname()[1]
    names = ("width", "layers", "batch", "steps", "inner_steps")
    words = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAGTAG_TOKEN": "a-token-of-the-benchmark"}
    with tempfile.TemporaryDirectory() as directory:
        processes: list[subprocess.Popen[str]] = []
        for site, place in (
            ("home", ["--address", ADDRESS, "--port", str(port)]),
            ("cloud", ["--hub", f"{ADDRESS}:{port}"]),
        ):
            command = [str(RAGTAG), "launch", "--local", "1", "--no-page", "--quiet", "--island", site, *place]
            command += ["--run-dir", f"{directory}/{site}", str(Path(__file__).resolve()), "--worker", *words]
            processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
            time.sleep(4.0)
        for process in processes:
            output = process.communicate(timeout=LIMIT_S)[0]
            if process.returncode:
                raise SystemExit(f"an island ended with status {process.returncode}:\n{output[-4000:]}")
            for line in output.splitlines():
                if line.startswith("ROW "):
                    row = json.loads(line.removeprefix("ROW "))
                    print(json.dumps(row) if arguments.json else shown(row), flush=True)


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['site']}: {row['parameters']:,} parameters, {row['step_s']:.3g} s a step, {row['steps']} steps: "
        f"outer loop {row['cost']:.2%} (training thread {row['training_thread']:.2%}, "
        f"client {row['client_thread']:.2%})"
    )


if __name__ == "__main__":
    main()
