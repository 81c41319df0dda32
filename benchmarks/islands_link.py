"""Two sites behind a slow link: islands against synchronising every step, over real TCP, by the clock.

    scripts/bench islands_link [--rates 10,100] [--steps 140] [--json]
    scripts/bench islands_link --drop 20,2 --steps 240        # the link gets slower in mid-run

Two network namespaces joined by a `tbf` (scripts/netns; needs root) stand for the sites; each has two emulated devices.
Nothing is simulated in the data path: all bytes between the sites go through the limited link, those of islands through
the hub's one port. One site alone, with the same two devices and as many samples a device, shows what the outer loop
itself costs. Compute utilisation is the mean over devices of the seconds they compute, over the seconds from one
step's end to the next one's, in the last 40 steps in which both sites train.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import ragtag
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn
from ragtag.watch.events import Contributed, Exchanged, Retuned

ROOT = Path(__file__).resolve().parent.parent
NETNS = ROOT / "scripts" / "netns"
RAGTAG = Path(sys.executable).with_name("ragtag")
NAME = "islands"
ADDRESS = "10.99.7.10"
PORT = 29571
LIMIT_S = 400
MEASURED = 40
BEFORE_DROP = 6
"""Rounds."""


def devices(hosts: str, arguments: argparse.Namespace) -> str:
    """A cluster file with two devices a host; "a" and "b" have speeds of their own."""
    speeds = arguments.speeds.split(",")
    parts = [f"[emulate]\nsample_ms = {arguments.sample_ms}\n"]
    for host in hosts:
        about = f'host = "{host}"\nspeed = {speeds["ab".index(host)]}\njitter = {arguments.jitter}\n'
        parts += [f'[[device]]\nname = "{host}{number}"\n{about}' for number in (0, 1)]
    return "".join(parts)


def worker(arguments: argparse.Namespace) -> None:
    """Train; one rank of each site prints how its last steps went."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGPT(width=arguments.width, num_layers=arguments.layers, context=arguments.context)
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        loss_fn,
        StandardLibrary(context=arguments.context),
        global_batch_size=arguments.batch,
        config=ragtag.Config(patience_s=60.0),
    )
    ends_s: list[float] = []
    computed_s: list[float] = []
    samples: list[int] = []
    inside_s: list[float] = []
    for report in trainer.steps(arguments.steps):
        ends_s.append(time.time())
        computed_s.append(statistics.fmean(report.compute_s))
        samples.append(report.samples)
        inside_s.append(report.wall_s)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        count = min(MEASURED, len(ends_s) - 1)
        wall_s = ends_s[-1] - ends_s[-1 - count]
        row = {
            "site": os.environ.get("RAGTAG_ISLAND", "all"),
            "step_s": wall_s / count,
            "utilisation": sum(computed_s[-count:]) / wall_s,
            "between_steps": 1 - sum(inside_s[-count:]) / wall_s,
            "samples_per_s": sum(samples[-count:]) / wall_s,
            "parameters": sum(each.numel() for each in model.parameters()),
            "steps": len(ends_s),
        }
        if arguments.trace:
            row |= {"ends_s": ends_s, "computed_s": computed_s}
        print("ROW " + json.dumps(row), flush=True)
    trainer.close()


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("ROW ")) for line in text.splitlines() if line.startswith("ROW ")]


def in_site(number: int, command: Sequence[str], **variables: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAGTAG_TOKEN": "a-token-of-the-benchmark", **variables}
    return subprocess.Popen(
        ["ip", "netns", "exec", f"{NAME}{number}", *command],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(processes: Sequence["subprocess.Popen[str]"]) -> list[dict[str, Any]]:
    """Their rows, once all have ended."""
    rows: list[dict[str, Any]] = []
    try:
        for process in processes:
            output = process.communicate(timeout=LIMIT_S)[0]
            if process.returncode:
                raise SystemExit(f"a site ended with status {process.returncode}:\n{output[-4000:]}")
            rows += rows_of(output)
    finally:
        for process in processes:
            process.kill()
    return rows


def words(arguments: argparse.Namespace, steps: int) -> list[str]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("width", "layers", "batch", "context")]
    trace = ["--trace"] if arguments.drop else []
    return [str(Path(__file__).resolve()), "--worker", *sizes, f"--steps={steps}", *trace]


def every_step(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All four devices synchronise after every step."""
    file = directory / "four.toml"
    file.write_text(devices("ab", arguments))
    processes = []
    for rank in range(4):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "RAGTAG_EMULATE": str(file)}
        meet = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(PORT + 1)}
        command = [sys.executable, *words(arguments, arguments.sync_steps)]
        processes.append(in_site(rank // 2, command, **place, **meet))
    return finished(processes)[0]


def alone(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One site without the other: half of the devices, half of the batch."""
    file = directory / "alone.toml"
    file.write_text(devices("a", arguments))
    half = argparse.Namespace(**{**vars(arguments), "batch": arguments.batch // 2})
    command = [str(RAGTAG), "launch", "--no-page", "--quiet", "--emulate", str(file)]
    command += ["--run-dir", tempfile.mkdtemp(dir=directory), *words(half, MEASURED + 20)]
    return finished([in_site(0, command)])[0]


def islands(
    arguments: argparse.Namespace, directory: Path, meanwhile: Callable[[Path], None] = lambda log: None
) -> list[dict[str, Any]]:
    """Two islands, through the hub's port."""
    run = Path(tempfile.mkdtemp(dir=directory))
    processes = []
    for number, (site, place) in enumerate(
        (("home", ["--address", ADDRESS, "--port", str(PORT)]), ("cloud", ["--hub", f"{ADDRESS}:{PORT}"]))
    ):
        file = directory / f"{site}.toml"
        file.write_text(devices("ab"[number], arguments))
        command = [str(RAGTAG), "launch", "--no-page", "--quiet", "--emulate", str(file), "--island", site, *place]
        command += ["--run-dir", str(run / site), *words(arguments, arguments.steps)]
        processes.append(in_site(number, command, RAGTAG_WARM_UP_STEPS="8"))
        if number == 0:
            time.sleep(3.0)
    meanwhile(run / "home" / "log.jsonl")
    rows = finished(processes)
    parts, tempos = read_log(run / "home" / "log.jsonl")
    for row in rows:
        own = [each for each in parts if each.island == row["site"]]
        sent, plain = sum(each.sent_bytes for each in own), sum(each.plain_bytes for each in own)
        row |= {
            "contributions": len(own),
            "sent_bytes": sent,
            "compression": plain / sent if sent else 0.0,
            "late": sum(each.age > 0 for each in own),
            "inner_steps": tempos[-1].inner_steps if tempos else 0,
            "why": tempos[-1].reason if tempos else "",
        }
    return rows


def read_log(path: Path) -> tuple[list[Contributed], list[Retuned]]:
    parts: list[Contributed] = []
    tempos: list[Retuned] = []
    for line in path.read_bytes().splitlines():
        kind = json.loads(line)["kind"]
        if kind == "exchange":
            parts += msgspec.json.decode(line, type=Exchanged).islands
        elif kind == "tempo":
            tempos.append(msgspec.json.decode(line, type=Retuned))
    return parts, tempos


def dropped(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Islands on a link that becomes slower once they have exchanged for a while; how they were before and after."""
    first, second = arguments.drop.split(",")
    seen: dict[str, Any] = {}

    def drop(log: Path) -> None:
        deadline_s = time.time() + LIMIT_S
        while not log.exists() or sum(each.fragment == 0 for _, each in exchanges(log)) < BEFORE_DROP:
            if time.time() > deadline_s:
                raise SystemExit("the islands do not exchange")
            time.sleep(0.5)
        netns("rate", "2", f"{second}mbit", NAME, BURST="32kb")
        seen["at_s"], seen["log"] = time.time(), log

    netns("up", "2", f"{first}mbit", NAME, BURST="32kb")
    try:
        rows = islands(arguments, directory, drop)
    finally:
        netns("down", "2", NAME)
    at_s = seen["at_s"]
    _, tempos = read_log(seen["log"])
    steps_before = [each.inner_steps for each in tempos if each.t <= at_s][-1]
    retuned = [each for each in tempos if each.t > at_s and each.inner_steps > steps_before]
    until_s = retuned[0].t if retuned else math.inf
    between = sum(each.fragment == 0 and at_s < t < until_s for t, each in exchanges(seen["log"]))
    found: dict[str, Any] = {
        "mbit_per_s": [float(first), float(second)],
        "inner_steps": [steps_before, *(each.inner_steps for each in tempos if each.t > at_s)],
        "reasons": [each.reason for each in tempos if each.t > at_s],
        "rounds_until_retuned": between if retuned else None,
        "seconds_until_retuned": until_s - at_s,
    }
    for row in rows:
        pairs = list(zip(row["ends_s"][1:], row["ends_s"], row["computed_s"][1:]))
        for name, chosen in (
            ("before", [each for each in pairs if at_s - 40 < each[0] <= at_s]),
            ("after", [each for each in pairs if each[0] > at_s]),
        ):
            found[f"{row['site']}_{name}"] = sum(each[2] for each in chosen) / sum(each[0] - each[1] for each in chosen)
    return found


def exchanges(path: Path) -> list[tuple[float, Exchanged]]:
    """All merges in a log, with their times."""
    found: list[tuple[float, Exchanged]] = []
    for line in path.read_bytes().splitlines():
        if b'"exchange"' in line[:80]:
            event = msgspec.json.decode(line, type=Exchanged)
            found.append((event.t, event))
    return found


def netns(*words: str, **variables: str) -> None:
    subprocess.run([str(NETNS), *words], check=True, env={**os.environ, **variables})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rates", default="10,100", help="Mbit/s of the link")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="samples of a step, of all sites together")
    parser.add_argument("--sample-ms", type=float, default=200.0, help="what forward and backward of a sample take")
    parser.add_argument("--speeds", default="1,1", help="of each device at the first site, and at the second")
    parser.add_argument("--jitter", type=float, default=0.0, help="of each device, as in cluster files")
    parser.add_argument("--steps", type=int, default=140, help="steps of the islands")
    parser.add_argument("--sync-steps", type=int, default=6, help="steps that are synchronised one by one")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--drop", metavar="FROM,TO", help="Mbit/s, before and after a change in mid-run")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    if arguments.drop:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(dropped(arguments, Path(directory))))
        return
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for rate in arguments.rates.split(","):
            netns("up", "2", f"{rate}mbit", NAME, BURST="32kb" if float(rate) < 100 else "64kb")
            try:
                sync = every_step(arguments, Path(directory))
                single = alone(arguments, Path(directory))
                apart = islands(arguments, Path(directory))
            finally:
                netns("down", "2", NAME)
            found.append({"mbit_per_s": float(rate), "every_step": sync, "alone": single, "islands": apart})
            print(shown(found[-1]), file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps(found))


def shown(row: dict[str, Any]) -> str:
    sync = row["every_step"]
    lines = [
        f"{row['mbit_per_s']:g} Mbit/s, {sync['parameters']:,} parameters",
        f"  every step: utilisation {sync['utilisation']:.1%}, {sync['step_s']:.3g} s a step, "
        f"{sync['samples_per_s']:.3g} samples/s",
        f"  one site alone: utilisation {row['alone']['utilisation']:.1%}, {row['alone']['step_s']:.3g} s a step",
    ]
    lines += [
        f"  island {each['site']}: utilisation {each['utilisation']:.1%}, {each['step_s']:.3g} s a step "
        f"({each['between_steps']:.2%} of it between steps), "
        f"{each['samples_per_s']:.3g} samples/s, H {each['inner_steps']}, {each['contributions']} contributions "
        f"({each['late']} late), {each['sent_bytes'] / 1e6:.3g} MB sent, {each['compression']:.2f} times less than fp32"
        for each in row["islands"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
