"""eta = samples/s of the cluster / sum of every device's own samples/s, on emulated unequal devices, against stock DDP.

    scripts/bench eta                           # every case; --list names them
    scripts/bench eta --case quarter,four --rounds 5
    scripts/bench eta --quick --json            # the first two cases in under 50 s
    scripts/bench eta --case quarter --peer accelerate

In one run and in the same processes, block by block: each device alone (all at once, no communication), DDP with equal
batches, DDP with the split set by hand, peers likewise, ragtag with its own shares. Blocks of one round use the same
step numbers, hence the same random slowdowns. Cases in which a device changes are followed step by step by a new
trainer each round, and compared with what the devices of each step could do alone. Reported are medians over rounds,
with the least and the greatest.

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
from pathlib import Path

import torch
import torch.distributed as dist
from unequal.cases import CASES, Case
from unequal.peers import PEERS
from unequal.ways import RagtagWay, Way, plain_way, summed_alone, together

from ragtag.examples.byte_gpt import StandardLibrary

QUICK_STEPS = 3
PULLED = {"ragtag": None, "ragtag_planned": False, "ragtag_pulled": True}


def worker(case: Case, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=world_size)
    dataset = StandardLibrary()
    alone = plain_way(case, dataset, rank, wrapped="")
    measured = measure_script if case.script else measure_blocks
    result = measured(case, arguments, alone, dataset, rank)
    if rank == 0:
        fixed = {"case": arguments.case, "what": case.what, "batch": case.batch, "target": case.target}
        print(json.dumps({**fixed, "rounds": arguments.rounds, **result}), flush=True)
    dist.destroy_process_group()


def measure_blocks(
    case: Case, arguments: argparse.Namespace, alone: Way, dataset: StandardLibrary, rank: int
) -> dict[str, object]:
    """Ways in alternating blocks."""
    steps = arguments.steps or case.steps
    ways: dict[str, Way] = {}
    for name in (*(["ddp"] if case.ddp else []), *arguments.peer):
        ways[f"{name}_equal"] = plain_way(case, dataset, rank, wrapped=name, equal=True)
        ways[f"{name}_by_hand"] = plain_way(case, dataset, rank, wrapped=name)
    for name in ("ragtag", *(f"ragtag_{suffix}" for suffix in case.against)):
        ways[name] = RagtagWay(case, dataset, pull=PULLED[name])
    if case.pinned:
        ways["ragtag_pinned"] = RagtagWay(case, dataset, shares=case.pinned)
    equal_steps = min(steps // 2, case.equal_steps or steps)
    blocks = {name: equal_steps if name.endswith("_equal") else steps for name in ways}
    for way in (alone, *ways.values()):
        way.run(arguments.warm_up if isinstance(way, RagtagWay) or way is alone else 1, 1)
    rows = []
    for number in range(arguments.rounds):
        first = arguments.warm_up + 1 + number * steps
        row = {"alone": summed_alone(alone, case.by_hand[rank], steps, first)}
        for name, way in ways.items():
            row[name] = together(way, blocks[name], first)
        rows.append(row)
    own = ways["ragtag"]
    assert isinstance(own, RagtagWay)
    trainer, plan, reports = own.trainer, own.trainer.plan, own.reports
    result: dict[str, object] = {name: spread([row[name] / row["alone"] for row in rows]) for name in ways}
    if case.compared == "eta":
        result["figure"] = result["ragtag"]["median"]  # pyright: ignore[reportIndexIssue]
    else:
        against = "ragtag_pulled" if "pulled" in case.against else "ragtag"
        result["compared"] = ratio = spread([row[against] / row[case.compared] for row in rows])
        result["figure"] = ratio["median"]
    result |= {"shares": list(plan.shares), "pulled": list(plan.pulled)}
    result |= {"plans": len({report.plan_id for report in reports}), "honest": honest([alone, *ways.values()])}
    summed = [row["alone"] for row in rows]
    result["solo_drift"] = round((max(summed) - min(summed)) / statistics.median(summed), 4)
    result["decisions"] = [decision.reason for decision in trainer.decisions if decision.kind != "shares"]
    for way in ways.values():
        way.close()
    return result


def measure_script(
    case: Case, arguments: argparse.Namespace, alone: Way, dataset: StandardLibrary, rank: int
) -> dict[str, object]:
    """A new trainer each round, followed step by step."""
    script = case.script
    assert script is not None
    alone.run(arguments.warm_up, 1)
    figures, etas, changes, shares = [], [], [], []
    for _ in range(arguments.rounds):
        possible = {
            number: summed_alone(alone, case.by_hand[rank], 1, number)
            for number in range(script.first, script.steps + 1, script.stride)
        }
        way = RagtagWay(case, dataset)
        dist.barrier()
        seconds = torch.tensor(way.run(script.steps, 1), dtype=torch.float64)
        dist.broadcast(seconds, 1)  # rank 1 never stalls: what a step takes for those who go on
        walls = dict(enumerate(seconds.tolist(), start=1))
        watched = range(script.first, script.steps + 1)
        first, stride = script.first, script.stride
        nearest = {number: first + (number - first) // stride * stride for number in watched}
        could = sum(walls[number] * possible[nearest[number]] for number in watched)
        etas.append(case.batch * len(watched) / could)
        if case.compared == "stall":
            usual = statistics.median(walls[number] for number in watched)
            figures.append(max(walls[number] for number in range(14, 20)) / usual)
        else:
            figures.append(etas[-1])
        changes.append(len(way.trainer.decisions))
        shares.append(sorted({report.shares for report in way.reports[script.first :]}))
        fine = honest([alone, way])
        way.close()
    return {
        "ragtag": spread(etas),
        "compared": spread(figures),
        "figure": spread(figures)["median"],
        "changes": changes,
        "shares": shares[-1],
        "honest": fine,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "greatest": round(max(values), 3),
    }


def honest(ways: list[Way]) -> bool:
    """Whether the real work fitted into every pace, on every rank."""
    fine = torch.tensor([float(all(way.pace.honest for way in ways))])
    dist.all_reduce(fine, op=dist.ReduceOp.MIN)
    return bool(fine)


def measure(name: str, arguments: argparse.Namespace) -> dict:
    """Run one case in processes of its own."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = Path(directory, f"{name}.toml")
        cluster.write_text(CASES[name].toml())
        launch = [sys.executable, "-m", "ragtag.cli.main", "launch", "--emulate", str(cluster), __file__]
        numbers = {"--rounds": arguments.rounds, "--steps": arguments.steps, "--warm-up": arguments.warm_up}
        own = ["--case", name, *(word for key, value in numbers.items() for word in (key, str(value)))]
        peers = [word for peer in arguments.peer for word in ("--peer", peer)]
        command = [*launch, *own, *peers, "--meeting", os.path.join(directory, "meeting")]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def show(row: dict) -> None:
    """A few words a case."""
    print(f"{row['case']}: {row['what']}, batch {row['batch']}, {row['rounds']} rounds")
    for name, value in row.items():
        if isinstance(value, dict):
            what = "" if name == "compared" else "eta "
            print(f"  {name:18} {what}{value['median']:.3f} ({value['least']:.3f}-{value['greatest']:.3f})")
    print(f"  target {row['target']}, measured {row['figure']:.3f}; shares {row['shares']}")
    for reason in row.get("decisions", []):
        print(f"  {reason}")
    if not row["honest"]:
        print("  the machine was too busy: real work did not fit into the pace")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="one, or several with commas between")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps of a block; 0: as the case says")
    parser.add_argument("--warm-up", type=int, default=12, help="steps in which paces and shares find their place")
    parser.add_argument("--quick", action="store_true", help="the first two cases, one short round")
    parser.add_argument("--peer", action="append", default=[], choices=sorted(PEERS), help="put a peer beside it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meeting:
        worker(CASES[arguments.case], arguments)
        return
    if arguments.list:
        for name, case in CASES.items():
            print(f"{name:18} {case.what}, batch {case.batch}")
        return
    names = arguments.case.split(",") if arguments.case else list(CASES)
    for name in names:
        if name not in CASES:
            parser.error(f"there is no case '{name}'; --list names them")
    for name in list(arguments.peer):
        if why := PEERS[name].why_not():
            print(f"{name} skipped: {why}", file=sys.stderr)
            arguments.peer.remove(name)
    if arguments.quick:
        names, arguments.rounds, arguments.steps, arguments.warm_up = names[:2], 1, QUICK_STEPS, 5
    rows = []
    for name in names:
        rows.append(measure(name, arguments))
        if not arguments.json:
            show(rows[-1])
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
