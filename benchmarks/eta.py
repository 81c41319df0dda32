"""eta = samples/s of the cluster / sum of every device's own samples/s, on emulated unequal devices, against stock DDP.

    scripts/bench eta                         # every case; --list names them
    scripts/bench eta --case quarter --rounds 5
    scripts/bench eta --quick --json          # the first two cases in under 50 s

In one run and in the same processes, block by block: each device alone (all at once, no communication), DDP with equal
batches, DDP with the split set by hand, ragtag with its own shares. Blocks of one round use the same step numbers,
hence the same random slowdowns. Reported are medians over rounds, with the least and the greatest.

Forward and backward are paced (40 ms a sample at speed 1, as in the study of ten peers that this is compared with); the
optimizer takes what it takes. In the -optimizer cases it is paced too: AdamW on this model costs 0.55 of a sample, so
22 ms at speed 1 and 88 ms at a quarter, a cost that no split of the batch shrinks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import ragtag
from ragtag.emulate.environment import from_environment
from ragtag.emulate.solo import plain_step, solo_speed
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn


@dataclass(frozen=True)
class Case:
    """One emulated cluster."""

    what: str
    speeds: tuple[float, ...]
    batch: int
    by_hand: tuple[int, ...]
    target: float
    steps: int = 12
    emulate: str = "sample_ms = 40"
    device: str = ""  # further TOML for the last device


JITTER = "sample_ms = 40\njitter = 0.3\njitter_per = "
CASES = {
    "quarter": Case("speeds 1, 1, 1/4", (1, 1, 0.25), 18, (8, 8, 2), 0.95),
    "four": Case("speeds 1, 1, 0.5, 0.25", (1, 1, 0.5, 0.25), 44, (16, 16, 8, 4), 0.95, steps=8),
    "tenth": Case("speeds 1, 1, 0.1", (1, 1, 0.1), 42, (20, 20, 2), 0.93, steps=8),
    "quarter-optimizer": Case(
        "the same, optimizer at device speed",
        (1, 1, 0.25),
        18,
        (8, 8, 2),
        0.95,
        emulate="sample_ms = 40\noptimizer_ms = 22",
    ),
    "four-optimizer": Case(
        "1, 1, 0.5, 0.25, optimizer likewise",
        (1, 1, 0.5, 0.25),
        44,
        (16, 16, 8, 4),
        0.95,
        8,
        "sample_ms = 40\noptimizer_ms = 22",
    ),
    "equal": Case("speeds 1, 1, 1", (1, 1, 1), 24, (8, 8, 8), 0.95),
    "jitter-step": Case(
        "30 % log-normal a step", (1, 1, 0.5, 0.25), 44, (16, 16, 8, 4), 0.90, steps=10, emulate=JITTER + '"step"'
    ),
    "jitter-micro": Case(
        "30 % log-normal a micro-batch", (1, 1, 0.5, 0.25), 44, (16, 16, 8, 4), 0.90, 10, JITTER + '"micro_batch"'
    ),
}


def toml(case: Case) -> str:
    """The case as a cluster file."""
    parts = ["[emulate]", case.emulate]
    for number, speed in enumerate(case.speeds):
        parts += ["[[device]]", f'name = "device{number}"', f"speed = {speed}"]
    return "\n".join([*parts, case.device, ""])


class Blocks:
    """One way to train, in blocks of steps; every way has a model, an optimizer and a pace of its own."""

    def __init__(self, rank: int, dataset: StandardLibrary, share: int, weight: float, *, ddp: bool) -> None:
        torch.manual_seed(0)
        emulator = from_environment(os.environ, rank)
        assert emulator is not None
        self.pace = emulator.pace
        bare = ByteGPT()
        self.pace.attach(bare)
        self.model = DistributedDataParallel(bare) if ddp else bare
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
        self.dataset, self.share, self.rank = dataset, share, rank

        def weighted(model: torch.nn.Module, batch) -> torch.Tensor:
            return loss_fn(model, batch) * weight

        self.step = plain_step(self.pace, self.model, optimizer, weighted, self.micro_batches)

    def micro_batches(self, number: int):
        start = (number * 997 + self.rank * 131) % (len(self.dataset) - self.share)
        return [(default_collate([self.dataset[start + i] for i in range(self.share)]), self.share)]

    def run(self, steps: int, first: int) -> float:
        return solo_speed(self.pace, self.step, steps, first_step=first).samples_per_s


def make_trainer(dataset: StandardLibrary, batch: int, *, pull: bool | None) -> ragtag.Trainer:
    """ragtag as a user would start it."""
    torch.manual_seed(0)
    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ragtag.Trainer(model, optimizer, loss_fn, dataset, global_batch_size=batch, config=ragtag.Config(pull=pull))


def worker(case: Case, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=world_size)
    dataset = StandardLibrary()
    equal = -(-case.batch // world_size)
    hand = case.by_hand[rank]
    ways = {
        "ddp_equal": Blocks(rank, dataset, equal, 1.0, ddp=True),
        "ddp_by_hand": Blocks(rank, dataset, hand, world_size * hand / case.batch, ddp=True),
    }
    alone = Blocks(rank, dataset, hand, 1.0, ddp=False)
    trainers = {"ragtag": make_trainer(dataset, case.batch, pull=None)}
    if "jitter" in case.emulate:
        trainers["ragtag_planned_only"] = make_trainer(dataset, case.batch, pull=False)

    def together(samples_per_step: int, run) -> float:
        dist.barrier()
        started = time.perf_counter()
        run()
        dist.barrier()
        return samples_per_step * arguments.steps / (time.perf_counter() - started)

    reports: dict[str, list[ragtag.StepReport]] = {name: [] for name in trainers}
    for _ in range(6):  # the pace learns when gradients come; the shares find their place
        alone.run(1, 1)
    for way in ways.values():
        way.run(6, 1)
    for name, trainer in trainers.items():
        reports[name] += trainer.steps(12)
    rows = []
    for number in range(arguments.rounds):
        first = 13 + number * arguments.steps
        dist.barrier()
        solo = torch.tensor([alone.run(arguments.steps, first)], dtype=torch.float64)
        dist.all_reduce(solo)
        row = {"solo": float(solo)}
        for name, way in ways.items():
            per_step = case.batch if name != "ddp_equal" else equal * world_size
            row[name] = together(per_step, lambda way=way, first=first: way.run(arguments.steps, first))
        for name, trainer in trainers.items():
            seen = reports[name]
            row[name] = together(case.batch, lambda t=trainer, seen=seen: seen.extend(t.steps(arguments.steps)))
        rows.append(row)
    honest = torch.tensor([float(way.pace.honest) for way in (alone, *ways.values())]).min().reshape(1)
    dist.all_reduce(honest, op=dist.ReduceOp.MIN)
    if rank == 0:
        result = {
            "case": arguments.case,
            "what": case.what,
            "batch": case.batch,
            "target": case.target,
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "shares": list(trainers["ragtag"].plan.shares),
            "pulled": list(trainers["ragtag"].plan.pulled),
            "plans": len({report.plan_id for report in reports["ragtag"]}),
            "honest": bool(honest),
        }
        for name in (*ways, *trainers):
            etas = [row[name] / row["solo"] for row in rows]
            result[name] = {
                "eta": round(statistics.median(etas), 3),
                "least": round(min(etas), 3),
                "greatest": round(max(etas), 3),
            }
        result["eta"] = result["ragtag"]["eta"]
        print(json.dumps(result), flush=True)
    for trainer in trainers.values():
        trainer.close()
    dist.destroy_process_group()


def measure(name: str, arguments: argparse.Namespace) -> dict:
    """Run one case in processes of its own."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        cluster = Path(directory, f"{name}.toml")
        cluster.write_text(toml(case))
        launch = [sys.executable, "-m", "ragtag.cli.main", "launch", "--emulate", str(cluster), __file__]
        own = ["--case", name, "--rounds", str(arguments.rounds), "--steps", str(arguments.steps or case.steps)]
        command = [*launch, *own, "--meeting", os.path.join(directory, "meeting")]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def show(row: dict) -> None:
    """One line a case."""
    parts = [f"{row['case']:13} {row['what']:30} batch {row['batch']:3}"]
    parts += [
        f"{name} {row[name]['eta']:.3f} ({row[name]['least']:.3f}-{row[name]['greatest']:.3f})"
        for name in ("ddp_equal", "ddp_by_hand", "ragtag_planned_only", "ragtag")
        if name in row
    ]
    parts.append(f"target {row['target']}, shares {row['shares']}, {row['plans']} plans")
    if row["pulled"]:
        parts.append(f"pulled {row['pulled']}")
    if not row["honest"]:
        parts.append("(the machine was too busy: real compute did not fit into the pace)")
    print("  ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps of a block; 0: as the case says")
    parser.add_argument("--quick", action="store_true", help="the first two cases, few rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meeting:
        worker(CASES[arguments.case], arguments)
        return
    if arguments.list:
        for name, case in CASES.items():
            print(f"{name:13} {case.what}, batch {case.batch}")
        return
    names = [arguments.case] if arguments.case else list(CASES)
    if arguments.quick:
        names, arguments.rounds, arguments.steps = names[:2], 1, 6
    rows = []
    for name in names:
        rows.append(measure(name, arguments))
        if not arguments.json:
            show(rows[-1])
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
