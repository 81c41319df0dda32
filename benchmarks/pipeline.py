"""Models cut into stages: the planner's cut against all others, and pipelines against ZeRO-3, each by the clock.

    scripts/bench pipeline [--case cut,links,zero] [--rounds 3] [--json]

`cut`: a GPT of eight blocks on two emulated devices of speeds 3 and 1 (the slower at full pace); the cut that a run
chooses by itself, the equal one, and all others in both orders. The figures are (step of the equal cut / step of the
chosen one) and (step of the chosen one / step of the best one).
`links`: two network namespaces joined by a `tbf` of 1 Gbit/s (scripts/netns; needs root), nothing emulated: `ragtag
profile`, then the planner, then its choice and ZeRO-3, side by side, in turns.
`zero`: emulated devices whose memory does not hold a replica, beside each other, with few samples a step: the planner
chooses slices; its choice and the best pipeline in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import ragtag
from ragtag.core.cluster_file import load_cluster
from ragtag.core.profile import load_profile
from ragtag.core.stages import text_from_stages
from ragtag.core.values import Stage
from ragtag.cost.candidate import Candidate
from ragtag.cost.problem import assemble
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn
from ragtag.plan.search import Choice, search

ROOT = Path(__file__).resolve().parent.parent
NETNS = ROOT / "scripts" / "netns"
LIMIT_S = 300
NUM_BLOCKS = 8
DEVICE = '[[device]]\nname = "{name}"\nhost = "{host}"\nspeed = {speed}\n{more}'
ADDRESS = "10.99.7.10"


def worker(arguments: argparse.Namespace) -> None:
    """Train some steps; rank 0 prints the median of the last ones."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGPT(width=arguments.width, num_layers=arguments.layers, context=arguments.context)
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn,
        StandardLibrary(context=arguments.context),
        global_batch_size=arguments.batch,
    )
    reports = list(trainer.steps(arguments.steps))
    if trainer.rank == 0:
        wall_s = statistics.median(report.wall_s for report in reports[2:])
        plan = trainer.plan
        row = {"step_s": wall_s, "loss": reports[-1].loss, "stages": text_from_stages(plan.stages)}
        print(json.dumps({**row, "layout": plan.layout, "reason": plan.reason}), flush=True)
    trainer.close()


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, for how long."""

    width: int
    layers: int = NUM_BLOCKS
    context: int = 64
    batch: int
    steps: int

    @property
    def words(self) -> list[str]:
        """As a command line."""
        return [f"--{name}={getattr(self, name)}" for name in ("width", "layers", "context", "batch", "steps")]


def last_line(output: str) -> dict[str, Any]:
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def launched(file: Path, model: Model, **variables: str) -> dict[str, Any]:
    """A run on emulated devices."""
    command = [sys.executable, "-m", "ragtag.cli.main", "launch", "--fixed", "--no-page", "--emulate", str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [*command, __file__, "--worker", *model.words],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return last_line(done.stdout)


def apart(name: str, model: Model, **variables: str) -> dict[str, Any]:
    """A run of two workers, each in a network namespace."""
    workers = []
    for rank in (0, 1):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        meet = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": "29556", "OMP_NUM_THREADS": "1"}
        workers.append(
            subprocess.Popen(
                ["ip", "netns", "exec", f"{name}{rank}", sys.executable, __file__, "--worker", *model.words],
                env={**os.environ, **place, **meet, **variables},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        output = workers[0].communicate(timeout=LIMIT_S)[0]
        if any(each.wait(timeout=30) for each in workers):
            raise SystemExit("a worker failed")
        return {} if "RAGTAG_PROFILE" in variables else last_line(output)
    finally:
        for each in workers:
            each.kill()


def median_of(run: Callable[[], dict[str, Any]], rounds: int) -> float:
    return statistics.median(run()["step_s"] for _ in range(rounds))


def in_turns(runs: Sequence[Callable[[], dict[str, Any]]], rounds: int) -> list[list[float]]:
    """Seconds of a step of each, by round."""
    found = []
    for number in range(rounds):
        order = list(enumerate(runs))
        seconds = [0.0] * len(runs)
        for place, run in order if number % 2 == 0 else reversed(order):
            seconds[place] = run()["step_s"]
        found.append(seconds)
    return found


def cluster_file(directory: Path, devices: Sequence[dict[str, Any]], emulate: str = "") -> Path:
    file = directory / f"{len(list(directory.iterdir()))}.toml"
    text = [DEVICE.format(**{"host": "localhost", "more": "", **device}) for device in devices]
    file.write_text("\n".join([f"[emulate]\n{emulate}\n" if emulate else "", *text]))
    return file


def measure_cut(rounds: int, directory: Path) -> dict[str, Any]:
    model = Model(width=64, batch=16, steps=8)
    devices = [{"name": "quick", "speed": 3}, {"name": "slow", "speed": 1}]
    file = cluster_file(directory, devices, "sample_ms = 60")
    variables = {"RAGTAG_LAYOUT": "pipeline", "RAGTAG_MICRO_BATCH": "1"}
    by_itself = launched(file, model, **variables)
    cuts = {}
    for order in ((0, 1), (1, 0)):
        for at in range(1, NUM_BLOCKS):
            first, second = order
            text = f"{first}:0-{at}, {second}:{at}-{NUM_BLOCKS}"
            cuts[text] = median_of(lambda text=text: launched(file, model, RAGTAG_STAGES=text, **variables), 1)
    chosen, equal = by_itself["stages"], f"0:0-{NUM_BLOCKS // 2}, 1:{NUM_BLOCKS // 2}-{NUM_BLOCKS}"
    best = min(cuts, key=lambda text: cuts[text])
    pairs = in_turns(
        [lambda text=text: launched(file, model, RAGTAG_STAGES=text, **variables) for text in (chosen, equal, best)],
        rounds,
    )
    return {
        "case": "cut",
        "chosen": chosen,
        "best_found": best,
        "all_step_s": {text: round(seconds, 4) for text, seconds in cuts.items()},
        "equal_over_chosen": ratios([(equal_s, chosen_s) for chosen_s, equal_s, _ in pairs]),
        "chosen_over_best": ratios([(chosen_s, best_s) for chosen_s, _, best_s in pairs]),
        "targets": {"equal_over_chosen": 1.6, "chosen_over_best": 1.03},
    }


def ratios(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    found = [first / second for first, second in pairs]
    return {"median": round(statistics.median(found), 3), "min": round(min(found), 3), "max": round(max(found), 3)}


def environment_of(candidate: Candidate, names: Sequence[str]) -> dict[str, str]:
    """What makes a run take a candidate's plan."""
    if candidate.layout == "pipeline":
        stages = []
        for part in candidate.parts:
            assert part.blocks is not None
            stages.append(Stage(rank=names.index(part.device), first=part.blocks[0], stop=part.blocks[1]))
        return {
            "RAGTAG_LAYOUT": "pipeline",
            "RAGTAG_STAGES": text_from_stages((tuple(stages),)),
            "RAGTAG_MICRO_BATCH": str(candidate.parts[0].micro_batch),
        }
    samples = {part.device: part.samples for part in candidate.parts}
    variables = {
        "RAGTAG_LAYOUT": candidate.layout.replace("-", ""),
        "RAGTAG_SHARES": ",".join(str(samples.get(name, 0)) for name in names),
    }
    if any(part.state_bytes is not None for part in candidate.parts):
        held = {part.device: part.state_bytes or 0 for part in candidate.parts}
        variables["RAGTAG_SLICES"] = ",".join(str(held.get(name, 0)) for name in names)
    sizes = [part.micro_batch for part in candidate.parts if part.micro_batch < part.samples]
    if sizes:
        variables["RAGTAG_MICRO_BATCH"] = str(min(sizes))
    return variables


def of_layout(choice: Choice, layout: str) -> Candidate:
    found = [each for each in choice.candidates if each.candidate is not None and each.candidate.layout == layout]
    assert found, f"no candidate of layout {layout}"
    candidate = max(found, key=lambda each: each.rate).candidate
    assert candidate is not None
    return candidate


def predicted(choice: Choice) -> dict[str, float]:
    return {each.name: round(each.prediction.step_s, 4) for each in choice.candidates if each.prediction is not None}


def measure_links(rounds: int, directory: Path) -> dict[str, Any]:
    model = Model(width=384, context=32, batch=8, steps=6)
    sites = [{"name": f"device{number}", "host": f"site{number}", "speed": 1} for number in (0, 1)]
    cluster = cluster_file(directory, sites)  # names only: nothing is emulated
    name = f"pipe{os.getpid() % 1000}-"
    subprocess.run([NETNS, "up", "2", "1gbit", name], check=True)
    try:
        file = directory / "profile.json"
        named = {"RAGTAG_EMULATE": str(cluster)}
        apart(name, model, RAGTAG_PROFILE=str(file), RAGTAG_PROFILE_FRESH="1", **named)
        profile = load_profile(file)
        choice = search(assemble(profile, load_cluster(cluster)))
        best = choice.best.candidate
        assert best is not None
        names = [device.name for device in profile.devices]
        both = (environment_of(best, names), {"RAGTAG_LAYOUT": "zero3"})  # ZeRO-3 on both, its shares following speed
        runs = [lambda variables=variables: apart(name, model, **named, **variables) for variables in both]
        pairs = in_turns(runs, rounds)
    finally:
        subprocess.run([NETNS, "down", "2", name], check=True)
    return {
        "case": "links",
        "link": [round(each.bandwidth_bytes_per_s / 125e6, 3) for each in profile.links if len(set(each.between)) > 1],
        "parameters": profile.model.parameters,
        "planner_chose": best.layout,
        "with": environment_of(best, names),
        "predicted_step_s": predicted(choice),
        "step_s": [round(statistics.median(each), 4) for each in zip(*pairs)],
        "zero3_over_chosen": ratios([(zero_s, best_s) for best_s, zero_s in pairs]),
        "targets": {"planner_chose": "pipeline", "zero3_over_chosen": 2.0},
    }


def measure_zero(rounds: int, directory: Path) -> dict[str, Any]:
    model = Model(width=128, context=32, batch=3, steps=6)
    devices = [{"name": f"device{number}", "speed": 1} for number in range(3)]
    whole = cluster_file(directory, devices, "sample_ms = 150")
    file = directory / "profile.json"
    command = [sys.executable, "-m", "ragtag.cli.main", "profile", "--emulate", str(whole), "--output", str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--fresh", __file__, "--worker", *model.words], env=environ, check=True, timeout=LIMIT_S)
    profile = load_profile(file)
    memory = profile.devices[0].memory
    assert memory is not None, "the memory curve was not measured"
    cap = int(0.8 * memory.fixed_bytes)
    small = cluster_file(directory, [{**each, "more": f'memory = "{cap}B"\n'} for each in devices], "sample_ms = 150")
    choice = search(assemble(profile, load_cluster(small)))
    best = choice.best.candidate
    assert best is not None
    names = [device["name"] for device in devices]
    pipeline = of_layout(choice, "pipeline")
    runs = [
        lambda candidate=candidate: launched(small, model, **environment_of(candidate, names))
        for candidate in (best, pipeline)
    ]
    pairs = in_turns(runs, rounds)
    return {
        "case": "zero",
        "planner_chose": best.layout,
        "predicted_step_s": predicted(choice),
        "step_s": [round(statistics.median(each), 4) for each in zip(*pairs)],
        "pipeline_over_chosen": ratios([(pipeline_s, best_s) for best_s, pipeline_s in pairs]),
        "targets": {"planner_chose": "zero-*", "pipeline_over_chosen": 1.0},
    }


CASES = {"cut": measure_cut, "links": measure_links, "zero": measure_zero}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default=",".join(CASES), help="some of them, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("width", "layers", "context", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    for name in arguments.case.split(","):
        with tempfile.TemporaryDirectory() as place:
            row = CASES[name](arguments.rounds, Path(place))
        print(json.dumps(row, indent=None if arguments.json else 1), flush=True)


if __name__ == "__main__":
    main()
