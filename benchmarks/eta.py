"""eta = samples/s of the cluster / sum of every device's own samples/s, on emulated unequal devices, against stock DDP.

    scripts/bench eta                           # every case; --list names them
    scripts/bench eta --case quarter,four --rounds 5
    scripts/bench eta --quick --json            # the first two cases in under 50 s
    scripts/bench eta --case quarter --peer accelerate

In one run and in the same processes, block by block: each device alone (all at once, no communication), DDP with equal
batches, DDP with the split set by hand, ragtag with its own shares. A peer gets a run of its own, beside the devices
alone and ragtag: what it starts or breaks is nobody else's, and its time is limited. Blocks of one round use the same
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
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from unequal.cases import CASES, Case
from unequal.peers import PEERS
from unequal.ways import BalancingWay, RagtagWay, SharedWay, Way, peer_ways, plain_way, summed_alone, together

from ragtag.examples.byte_gpt import StandardLibrary

QUICK_STEPS = 3
PEER_WARM_UP = 3
PEER_START_S, PEER_ROUND_S = 120, 60
"""How long a peer may take to start and settle, and for each round."""
END_S = 15
"""How long a launch may take to end its workers; it needs at most 4 s and what their output takes."""
PULLED = {"ragtag": None, "ragtag_planned": False, "ragtag_pulled": True}


def worker(case: Case, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=world_size)
    dataset = StandardLibrary()
    alone = plain_way(case, dataset, rank, wrapped="")
    if arguments.peer:
        peer_worker(case, arguments, alone, dataset, rank)
    measured = measure_script if case.script else measure_blocks
    result = measured(case, arguments, alone, dataset, rank)
    if rank == 0:
        fixed = {"case": arguments.case, "what": case.what, "batch": case.batch, "target": case.target}
        print(json.dumps({**fixed, "rounds": arguments.rounds, **result}), flush=True)
    dist.destroy_process_group()


def peer_worker(case: Case, arguments: argparse.Namespace, alone: Way, dataset: StandardLibrary, rank: int) -> NoReturn:
    """Measure one peer and end this process, whatever threads and children the peer has left."""
    try:
        result = measure_peer(case, arguments, alone, dataset, rank)
    except BaseException as error:
        traceback.print_exc()
        with suppress(FileExistsError), open(failure_file(arguments.meeting), "x") as file:
            file.write(f"rank {rank}: {type(error).__name__}: {error}")
        os._exit(1)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)


def failure_file(meeting: str) -> Path:
    """Where the first rank that fails says why."""
    return Path(meeting).with_name("failure")


def measure_peer(
    case: Case, arguments: argparse.Namespace, alone: Way, dataset: StandardLibrary, rank: int
) -> dict[str, object]:
    """A peer's ways and ragtag in alternating blocks."""
    steps = arguments.steps or case.steps
    (name,) = arguments.peer
    ways = peer_ways(name, PEERS[name], case, dataset, rank)
    peers = list(ways.values())
    ways["ragtag"] = RagtagWay(case, dataset)
    fewer_steps = min(steps // 2, case.equal_steps or steps)
    blocks = {name: fewer_steps if name.endswith("_equal") or PEERS.get(name) else steps for name in ways}
    for way in (alone, *ways.values()):
        if not isinstance(way, BalancingWay):  # which settles before each block
            way.run(PEER_WARM_UP if isinstance(way, SharedWay) else arguments.warm_up, 1)
    rows = alternate(case, arguments, alone, ways, blocks, rank)
    result: dict[str, object] = {name: spread([row[name] / row["alone"] for row in rows]) for name in ways}
    result["honest"] = honest([alone, *ways.values()])
    for way in peers:
        if isinstance(way, SharedWay):
            way.check()
        elif isinstance(way, BalancingWay):
            result["epochs"], result["complete_epochs"] = way.measured_epochs, way.complete_epochs
    for way in ways.values():
        way.close()
    return result


def alternate(
    case: Case, arguments: argparse.Namespace, alone: Way, ways: dict[str, Way], blocks: dict[str, int], rank: int
) -> list[dict[str, float]]:
    """Samples a second of every way, by round; of the devices alone their sum, "alone"."""
    steps = arguments.steps or case.steps
    rows = []
    for number in range(arguments.rounds):
        first = arguments.warm_up + 1 + number * steps
        row = {"alone": summed_alone(alone, case.by_hand[rank], steps, first)}
        for name, way in ways.items():
            row[name] = together(way, blocks[name], first)
        rows.append(row)
    return rows


def measure_blocks(
    case: Case, arguments: argparse.Namespace, alone: Way, dataset: StandardLibrary, rank: int
) -> dict[str, object]:
    """Ways in alternating blocks."""
    steps = arguments.steps or case.steps
    ways: dict[str, Way] = {}
    if case.ddp:
        ways["ddp_equal"] = plain_way(case, dataset, rank, wrapped="ddp", equal=True)
        ways["ddp_by_hand"] = plain_way(case, dataset, rank, wrapped="ddp")
    for name in ("ragtag", *(f"ragtag_{suffix}" for suffix in case.against)):
        ways[name] = RagtagWay(case, dataset, pull=PULLED[name])
    if case.pinned:
        ways["ragtag_pinned"] = RagtagWay(case, dataset, shares=case.pinned)
    equal_steps = min(steps // 2, case.equal_steps or steps)
    blocks = {name: equal_steps if name.endswith("_equal") else steps for name in ways}
    alone.run(min(12, arguments.warm_up), 1)
    for way in ways.values():
        way.run(arguments.warm_up if isinstance(way, RagtagWay) else 1, 1)
    rows = alternate(case, arguments, alone, ways, blocks, rank)
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
    """Run one case in processes of its own, and each peer beside it."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            launch(name, arguments, Path(directory)), env=environment(), stdout=subprocess.PIPE, text=True, check=True
        )
    row = json.loads(done.stdout.splitlines()[-1])
    for peer in arguments.peer:
        if CASES[name].script:
            print(
                f"{peer} skipped: '{name}' follows ragtag through a change; a peer needs a case of blocks, such as "
                "--case quarter",
                file=sys.stderr,
            )
            continue
        limit_s = PEER_START_S + PEER_ROUND_S * arguments.rounds
        with tempfile.TemporaryDirectory() as directory:
            command = launch(name, arguments, Path(directory), peer)
            row.setdefault("peers", {})[peer] = beside(command, Path(directory), limit_s=limit_s)
    return row


def launch(name: str, arguments: argparse.Namespace, directory: Path, peer: str = "") -> list[str]:
    """The command that runs a case, or one peer in it; it meets, and fails, in `directory`."""
    cluster = directory / f"{name}.toml"
    cluster.write_text(CASES[name].toml())
    warm_up = arguments.warm_up or CASES[name].warm_up
    numbers = {"--rounds": arguments.rounds, "--steps": arguments.steps, "--warm-up": warm_up}
    own = ["--case", name, *(word for key, value in numbers.items() for word in (key, str(value)))]
    command = [
        sys.executable,
        "-m",
        "ragtag.cli.main",
        "launch",
        "--fixed",
        "--no-page",
        "--emulate",
        str(cluster),
        __file__,
        *own,
    ]
    return [*command, *(["--peer", peer] if peer else []), "--meeting", str(directory / "meeting")]


def environment() -> dict[str, str]:
    """One thread a worker."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def beside(command: list[str], directory: Path, *, limit_s: float) -> dict:
    """Run a peer's launch for a bounded time; return its result, or {"failed": why}."""
    output, errors = directory / "output", directory / "errors"
    late = False
    with open(output, "w") as out, open(errors, "w") as err:
        process = subprocess.Popen(command, env=environment(), stdout=out, stderr=err)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            process.terminate()  # where it runs still, it ends its workers and all that they started
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode == 0 and not late:
        return json.loads(output.read_text().splitlines()[-1])
    last_words = errors.read_text(errors="replace").splitlines()[-15:]
    print(*last_words, sep="\n", file=sys.stderr)
    if late:
        return {"failed": f"no result within {limit_s:g} s"}
    if failure_file(command[-1]).exists():
        return {"failed": failure_file(command[-1]).read_text()}
    return {"failed": last_words[-1] if last_words else f"it ended with status {process.returncode}"}


def show(row: dict) -> None:
    """A few words a case."""
    print(f"{row['case']}: {row['what']}, batch {row['batch']}, {row['rounds']} rounds")
    show_spreads(row)
    print(f"  target {row['target']}, measured {row['figure']:.3f}; shares {row['shares']}")
    for reason in row.get("decisions", []):
        print(f"  {reason}")
    if not row["honest"]:
        print("  the machine was too busy: real work did not fit into the pace")
    for peer, result in row.get("peers", {}).items():
        if "failed" in result:
            print(f"  {peer} failed: {result['failed']}")
            continue
        print(f"  beside {peer}:")
        show_spreads(result, indent="    ")
        if "epochs" in result:
            print(f"    gradients of all ranks in {result['complete_epochs']} of {result['epochs']} epochs")
        if not result["honest"]:
            print("    the machine was too busy: real work did not fit into the pace")
    sys.stdout.flush()


def show_spreads(row: dict, indent: str = "  ") -> None:
    """The etas in it, a line each."""
    for name, value in row.items():
        if isinstance(value, dict) and "median" in value:
            what = "" if name == "compared" else "eta "
            print(f"{indent}{name:18} {what}{value['median']:.3f} ({value['least']:.3f}-{value['greatest']:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="one, or several with commas between")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps of a block; 0: as the case says")
    parser.add_argument("--warm-up", type=int, default=0, help="steps before; 0: as the case says")
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
