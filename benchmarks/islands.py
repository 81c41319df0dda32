"""Time to quality on two sites behind a slow link: islands against what else one can do, with real training.

    scripts/bench islands [--seeds 3] [--write] [--json]
    scripts/bench islands --quick                             # one seed, a tenth of the steps: under a minute
    scripts/bench islands --torchft /path/to/python           # torchft's DiLoCo as well, by a Python that has it

A byte-level GPT (0.23 M parameters) is warmed up by exact steps, then trains on as many sequences with each method, at
the learning rate that did best for it at half that length on the first seed. Sites have devices of speeds 1, 1 and
0.5, 0.5; sending all numbers there and back takes as long as about 100 of their steps. Losses are those of real
training through the classes of a run; the clock is virtual (benchmarks/unequal/sites.py), since paced runs would take
hours.

rho = exp(-(L - L_exact) / S) is what part of its sequences a method makes count, where S = -dL/dlnD is read from exact
runs of half and of full length; time = sequences / (rate * rho), over that of a cluster with free links whose devices
never wait. The last round, blocking and in fp32, is a constant on top: it is told apart, since so short a run makes
much of it. What is done already is kept in runs/islands-study-1, so a stopped study goes on.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from unequal.sites import (
    BATCH,
    FULL_EXCHANGE,
    LOOKED_AT,
    SPEEDS,
    Data,
    Outcome,
    Replica,
    Sites,
    Times,
    exact,
)

from ragtag.outer.protocol import Wanted

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "runs" / "islands-study-1"
"""Another number where what is kept, or what it was made by, is not the same any more."""
DOCS = ROOT / "docs"
RATES = (1e-3, 2e-3, 3e-3)
ALL = tuple(speed for site in SPEEDS for speed in site)
FLAT = tuple((speed,) for speed in ALL)
"""Every device for itself, over the slow link."""

Runner = Callable[[Data, int, float, Path, int], Outcome]


def _exact(data: Data, seed: int, rate: float, start: Path, sequences: int) -> Outcome:
    curve: list[tuple[float, int, float]] = []

    def look(done: int, replica: Replica) -> None:
        if done // (sequences // 20) != (done + BATCH) // (sequences // 20):
            curve.append((0.0, done, data.loss(replica.model, LOOKED_AT)))

    replica = exact(data, seed, rate, start, sequences, look=look)
    return Outcome(data.loss(replica.model), sequences, 0.0, curve)


def _sites(data: Data, seed: int, rate: float, start: Path, sequences: int, *, wanted: Wanted, **about: Any) -> Outcome:
    return Sites(data, seed, rate, start, sequences, wanted, curve_every=sequences // 20, **about).run()


METHODS: dict[str, Runner] = {
    "exact": _exact,
    "islands": partial(_sites, wanted=Wanted()),
    "async": partial(_sites, wanted=Wanted(asynchronous=True, rate=1.0, momentum=0.0, oldest=8)),
    "diloco": partial(_sites, wanted=Wanted(inner_steps=100, codec="fp32"), fragments=1, speeds=FLAT, waits=True),
}
ABOUT = {
    "exact": "exact synchronisation",
    "islands": 'islands, `mode="islands"`',
    "async": '`mode="async"`',
    "diloco": "flat DiLoCo, 4 workers, H = 100, fp32, blocking",
    "torchft": "torchft's DiLoCo, 4 replica groups, H = 100, fp32",
}


def kept(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was found out before under this name, or now."""
    path = KEPT / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(path)
    return found


def train(method: str, seed: int, rate: float, sequences: int, warm: int, extra: str = "") -> dict[str, Any]:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    about: dict[str, Any] = {"away": (sequences / 9, 2 * sequences / 9)} if extra == "away" else {}

    def make() -> dict[str, Any]:
        data, began_s = Data(), time.monotonic()
        start = warmed(data, seed, warm)
        outcome = METHODS[method](data, seed, rate, start, sequences, **about)
        return {**vars(outcome), "method": method, "seed": seed, "rate": rate, "cpu_s": time.monotonic() - began_s}

    return kept(f"{method}-{extra}{seed}-{rate:g}-{sequences}-{warm}", make)


def torchft(python: Path, seed: int, rate: float, sequences: int, warm: int) -> dict[str, Any]:
    """One run of torchft's DiLoCo; its time is that of the slowest device, with a quarter of the batch as all have."""

    def make() -> dict[str, Any]:
        words = [f"--seed={seed}", f"--rate={rate}", f"--sequences={sequences}"]
        start = KEPT / f"warm-{seed}-{warm}.pt"
        done = subprocess.run(
            [str(python), "-m", "unequal.torchft_diloco", *words, f"--start={start}"],
            cwd=Path(__file__).resolve().parent,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr[-2000:]
            raise SystemExit(f"{python} could not run torchft's DiLoCo (pip install torchft==0.2.0):\n{said}")
        times, steps = Times(seed + 5), sequences // BATCH
        units = sum(max(times.step(BATCH // len(ALL), (speed,)) for speed in ALL) for _ in range(steps))
        rounds = steps // 100
        about = {"inner_steps": 100, "merges": rounds, "late": 0, "sent_bytes": 0, "last_round": 0.0}
        loss = json.loads(done.stdout.splitlines()[-1])["loss"]
        outcome = Outcome(loss, sequences, units + FULL_EXCHANGE * rounds, [], about)
        return {**vars(outcome), "method": "torchft", "seed": seed, "rate": rate}

    return kept(f"torchft-{seed}-{rate:g}-{sequences}-{warm}", make)


def warmed(data: Data, seed: int, steps: int) -> Path:
    """Parameters and optimizer's state after some exact steps."""
    path = KEPT / f"warm-{seed}-{steps}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        exact(data, seed, 3e-3, None, steps * BATCH, decay=False).save(path)
    return path


def warm_up(seed: int, steps: int) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    warmed(Data(), seed, steps)


def study(
    seeds: Sequence[int], steps: int, warm: int, methods: Sequence[str], python: Path | None = None
) -> dict[str, Any]:
    """Tune on the first seed, then train on all."""
    sequences, tuning = steps * BATCH, steps * BATCH // 2
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(warm_up, seeds, [warm] * len(seeds)))
        tuned = {
            (method, rate): pool.submit(train, method, seeds[0], rate, tuning, warm)
            for method in methods
            for rate in RATES
        }
        rates = {method: min(RATES, key=lambda rate: tuned[method, rate].result()["loss"]) for method in methods}
        runs = {
            (method, seed): pool.submit(train, method, seed, rates[method], sequences, warm)
            for method in methods
            for seed in seeds
        }
        halves = {seed: pool.submit(train, "exact", seed, rates["exact"], tuning, warm) for seed in seeds}
        gone = {
            (method, seed): pool.submit(train, method, seed, rates[method], sequences, warm, "away")
            for method in ("islands", "async")
            for seed in seeds
            if method in methods
        }
        results = {key: each.result() for key, each in runs.items()}
        half = {seed: each.result()["loss"] for seed, each in halves.items()}
        away = {key: each.result() for key, each in gone.items()}
    if python is not None:
        rates["torchft"] = min(RATES, key=lambda rate: torchft(python, seeds[0], rate, tuning, warm)["loss"])
        for seed in seeds:
            results["torchft", seed] = torchft(python, seed, rates["torchft"], sequences, warm)
    slope = statistics.fmean((half[seed] - results["exact", seed]["loss"]) / math.log(2) for seed in seeds)
    return {
        "seeds": list(seeds),
        "sequences": sequences,
        "slope": slope,
        "rates": rates,
        "rows": rows(results, seeds, sequences, slope, rates),
        "away": rows(away, seeds, sequences, slope, rates, beside=results) if away else [],
        "curves": {method: results[method, seeds[0]]["curve"] for method in methods},
        "losses": {f"{method}/{seed}": each["loss"] for (method, seed), each in results.items()},
    }


def rows(
    results: dict[tuple[str, int], dict[str, Any]],
    seeds: Sequence[int],
    sequences: int,
    slope: float,
    rates: dict[str, float],
    beside: dict[tuple[str, int], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The table: each method's rate, loss and time to the exact run's loss, over that of an ideal cluster."""
    reference = beside or results
    exact_loss = statistics.fmean(reference["exact", seed]["loss"] for seed in seeds)
    ideal = sum(ALL)
    times = Times(11)
    found: list[dict[str, Any]] = []

    def add(name: str, rate: float, losses: Sequence[float], last_round: float = 0.0, **about: Any) -> None:
        rise = statistics.fmean(losses) - exact_loss
        rho = min(1.0, math.exp(-rise / slope))
        spread = (max(losses) - min(losses)) / 2 if len(losses) > 1 else 0.0
        found.append(
            {
                "name": name,
                "rate": rate,
                "rise": rise,
                "relative": rise / exact_loss,
                "spread": spread,
                "rho": rho,
                "times": ideal / (rate * rho),
                "whole_times": ideal / (rate * rho) + last_round * ideal / sequences,
                **about,
            }
        )

    if beside is None:
        exact_losses = [results["exact", seed]["loss"] for seed in seeds]
        add("ideal cluster: free links, no waiting", ideal, exact_losses)
        add("exact, free links", times.rate(ALL), exact_losses)
        add("exact, the fast site alone", times.rate(SPEEDS[0]), exact_losses)
        add("exact, every step over the slow link", times.rate(ALL, exchange=FULL_EXCHANGE), exact_losses)
    for method in ABOUT:
        of = [results[method, seed] for seed in seeds if (method, seed) in results]
        if not of or method == "exact":
            continue
        rate = statistics.fmean(each["sequences"] / each["units"] for each in of)
        losses = [each["loss"] for each in of]
        about = {key: of[0]["about"][key] for key in ("inner_steps", "merges", "late", "sent_bytes")}
        last_round = statistics.fmean(each["about"]["last_round"] for each in of)
        add(ABOUT[method], rate, losses, last_round, learning_rate=rates[method], **about)
    return found


def shown(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| method | sequences / unit | loss over exact | rho | time to exact's loss / ideal | with its last round | |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, some in (("", found["rows"]), ("second site away for a while: ", found["away"])):
        for row in some:
            notes = f"H {row['inner_steps']}, lr {row['learning_rate']:g}" if "inner_steps" in row else ""
            lines.append(
                f"| {title}{row['name']} | {row['rate']:.3g} | {row['rise']:+.4f} ({row['relative']:+.2%}) "
                f"| {row['rho']:.2f} | {row['times']:.2f} | {row['whole_times']:.2f} | {notes} |"
            )
    return "\n".join(lines)


def plot(found: dict[str, Any]) -> str:
    """Held-out loss against time, as SVG."""
    width, height, left, bottom = 720, 340, 56, 40
    curves = {ABOUT[name]: curve for name, curve in found["curves"].items() if curve and name != "exact"}
    for row in found["rows"][1:3]:  # one curve, at two rates
        curves[row["name"]] = [(done / row["rate"], done, loss) for _, done, loss in found["curves"]["exact"]]
    longest = max(point[0] for curve in curves.values() for point in curve)
    losses = [point[2] for curve in curves.values() for point in curve]
    low, high = min(losses), max(losses)

    def place(units: float, loss: float) -> str:
        x = left + (width - left - 20) * units / longest
        y = 20 + (height - bottom - 20) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    colours = ("#1b6ca8", "#c0392b", "#27ae60", "#222222", "#999999")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">units (a sequence on a device of speed 1)</text>',
        '<text x="8" y="14">held-out loss, first seed</text>',
    ]
    for units in range(0, int(longest), 2000):
        x = place(units, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 16}" text-anchor="middle">{units:,}</text>')
    for tenths in range(math.ceil(20 * low), math.floor(20 * high) + 1):
        y = place(0, tenths / 20).split(",")[1]
        parts.append(
            f'<text x="{left - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{tenths / 20:.2f}</text>'
        )
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(place(units, loss) for units, _, loss in curve)
        colour, label = colours[number], name.replace("`", "").replace('"', "&quot;")
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 330}" y="{34 + 18 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(found: dict[str, Any]) -> None:
    """Put the table between the markers of docs/benchmarks.md, and the plot beside it."""
    path = DOCS / "benchmarks.md"
    text = path.read_text()
    before, rest = text.split("<!-- scripts/bench islands --write -->\n", 1)
    after = rest.split("<!-- end -->", 1)[1]
    path.write_text(f"{before}<!-- scripts/bench islands --write -->\n{shown(found)}\n<!-- end -->{after}")
    (DOCS / "islands_quality.svg").write_text(plot(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="exact steps that the sequences would be")
    parser.add_argument("--warm", type=int, default=1500, help="exact steps before")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--torchft", type=Path, metavar="PYTHON", help="one with torchft 0.2.0 and ragtag's own needs")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write table and plot into docs/")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.warm = 1, 100, 150
    methods = arguments.methods.split(",")
    found = study(range(arguments.seeds), arguments.steps, arguments.warm, methods, arguments.torchft)
    if arguments.write:
        write(found)
    print(json.dumps(found) if arguments.json else shown(found))
    print(f"S = {found['slope']:.3f}, learning rates {found['rates']}", file=sys.stderr)


if __name__ == "__main__":
    main()
