"""Step time with state in slices: ZeRO-3 against FSDP2 on equal devices, ZeRO-1 against whole replicas, side by side.

    scripts/bench zero [--case zero3,zero1] [--rounds 9] [--steps 3] [--json]
    scripts/bench zero --case eta [--rounds 3]      # ZeRO-3 on emulated devices of speeds 1, 1, 1/2, 1/4

Two workers of one thread each hold both copies of a GPT and train them in alternating blocks of steps, the order turned
round each time, so that whatever else the machine does falls on both. The figure is the median over rounds of (seconds
of the first / seconds of the second). Micro-batches are large enough for compute to dominate; FSDP2 runs on gloo, its
blocks wrapped one by one and gathered again in backward, as in ZeRO-3. `eta` is `scripts/bench eta --case four` with
RAGTAG_LAYOUT=zero3.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import ragtag
from ragtag.core.values import Layout
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn

CASES = {"zero3": ("zero3", "fsdp2", 1.10), "zero1": ("zero1", "replicated", 1.03), "zero2": ("zero2", "replicated", 0)}
"""By name: a way, the one it is compared with, and the target of the ratio of their step times; 0: none."""
ETA_TARGET = 0.90


def gpt(arguments: argparse.Namespace) -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(width=arguments.width, num_layers=arguments.layers)


def fsdp2_steps(arguments: argparse.Namespace, dataset: StandardLibrary) -> Iterator[None]:
    """A stock step at a time, for ever."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = gpt(arguments)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset, shuffle=True)
    while True:
        for batch in DataLoader(dataset, batch_size=arguments.share, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            yield


def ragtag_steps(arguments: argparse.Namespace, dataset: StandardLibrary, layout: Layout) -> Iterator[None]:
    """The same with ragtag."""
    model = gpt(arguments)
    world_size = dist.get_world_size()
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn,
        dataset,
        global_batch_size=arguments.share * world_size,
        shares=(arguments.share,) * world_size,
        config=ragtag.Config(layout=layout, slices=None if layout == "replicated" else (1,) * world_size),
    )
    for _ in trainer.steps(1 << 40):
        yield


def block_s(steps: Iterator[None], count: int) -> float:
    """Seconds that some steps take, on the rank that is last."""
    dist.barrier()
    started_s = time.perf_counter()
    for _ in range(count):
        next(steps)
    dist.barrier()
    return time.perf_counter() - started_s


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=world_size)
    dataset = StandardLibrary()
    names = CASES[arguments.case][:2]
    ways = [
        fsdp2_steps(arguments, dataset) if name == "fsdp2" else ragtag_steps(arguments, dataset, cast(Layout, name))
        for name in names
    ]
    for way in ways:
        block_s(way, arguments.steps)  # warm-up
    rounds = []
    for number in range(arguments.rounds):
        seconds = [0.0, 0.0]
        for each in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[each] = block_s(ways[each], arguments.steps) / arguments.steps
        rounds.append(seconds)
    if rank == 0:
        ratios = [first / second for first, second in rounds]
        row = {
            "case": arguments.case,
            "ways": names,
            "parameters": sum(parameter.numel() for parameter in gpt(arguments).parameters()),
            "samples_per_step": arguments.share * world_size,
            "step_s": [round(statistics.median(each), 4) for each in zip(*rounds)],
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "rounds": arguments.rounds,
            "target": CASES[arguments.case][2],
        }
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def measure(case: str, arguments: argparse.Namespace) -> dict:
    """Run one case in workers of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "ragtag.cli.main", "launch", "--fixed", "--no-page"]
        command += ["--local", "2", __file__, "--case", case, "--meeting", os.path.join(directory, "meeting")]
        for name in ("rounds", "steps", "share", "width", "layers"):
            command += [f"--{name}", str(getattr(arguments, name))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_eta(arguments: argparse.Namespace) -> dict:
    """The case `four` of `scripts/bench eta`, with parameters in slices."""
    command = [sys.executable, str(Path(__file__).with_name("eta.py")), "--case", "four", "--json"]
    command += ["--rounds", str(arguments.rounds)]
    environment = {**os.environ, "RAGTAG_LAYOUT": "zero3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (row,) = json.loads(done.stdout)
    return {**row, "case": "eta", "target": ETA_TARGET}


def show(row: dict) -> None:
    """A line a case."""
    if row["case"] == "eta":
        eta = row["ragtag"]
        print(
            f"eta of zero3, {row['what']}: {eta['median']} ({eta['least']}-{eta['greatest']}) over {row['rounds']} "
            f"rounds, shares {row['shares']}, target {row['target']}"
        )
        if not row["honest"]:
            print("  the machine was too busy: real work did not fit into the pace")
        return
    first, second = row["ways"]
    print(
        f"{row['parameters'] / 1e6:.2f} M parameters, {row['samples_per_step']} samples: {first} {row['step_s'][0]} s, "
        f"{second} {row['step_s'][1]} s, ratio {row['ratio_median']} ({row['ratio_min']}-{row['ratio_max']}) over "
        f"{row['rounds']} rounds" + (f", target {row['target']}" if row["target"] else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="zero3,zero1", help="zero3, zero2, zero1, eta; several with commas between")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    parser.add_argument("--share", type=int, default=16, help="samples of a rank's micro-batch, of 64 bytes each")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meeting:
        worker(arguments)
        return
    rows = []
    for case in arguments.case.split(","):
        if case != "eta" and case not in CASES:
            parser.error(f"there is no case '{case}'")
        rows.append(measure_eta(arguments) if case == "eta" else measure(case, arguments))
        if not arguments.json:
            show(rows[-1])
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
