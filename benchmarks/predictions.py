"""How near the cost model comes: predicted against achieved step times of emulated runs, on five unequal clusters.

    scripts/bench predictions
    scripts/bench predictions --cluster link --json

For each cluster: `ragtag profile` measures it, the planner prices its own choice and an even split, and both are run by
`ragtag launch`, with the same script, as a user would. Achieved is the median of the last steps. The verdict on the
last device is held against two runs as well: the best plan with it and the best one without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ragtag.core.cluster_file import load_cluster
from ragtag.core.profile import load_profile
from ragtag.cost.problem import Problem, assemble
from ragtag.plan.file import plan_file, save_plan
from ragtag.plan.replicated import even
from ragtag.plan.search import price, search
from ragtag.plan.what_if import apply_edit

RAGTAG = [sys.executable, "-m", "ragtag.cli.main"]
SCRIPT = ["-m", "ragtag.examples.byte_gpt"]
STEPS, SETTLED = 14, 5
DEVICE = '[[device]]\nname = "device{}"\nspeed = {}\n'


def cluster(speeds: tuple[float, ...], emulate: str, extra: dict[int, str] | None = None, rest: str = "") -> str:
    devices = [DEVICE.format(number, speed) + (extra or {}).get(number, "") for number, speed in enumerate(speeds)]
    return "\n".join([f"[emulate]\n{emulate}", *devices, rest])


CLUSTERS = {
    "four": (44, cluster((1, 1, 0.5, 0.25), "sample_ms = 40")),
    "tenth": (42, cluster((1, 1, 0.1), "sample_ms = 40")),
    "optimizer": (18, cluster((1, 1, 0.25), "sample_ms = 40\noptimizer_ms = 22\nfixed_ms = 10")),
    "memory": (32, cluster((1, 1, 0.5), "sample_ms = 40\nmicro_batch_ms = 20", {0: 'memory = "60MB"\n'})),
    "link": (
        32,
        cluster(
            (1, 0.5, 1),
            "sample_ms = 40",
            {2: 'host = "away"\n'},
            '[[link]]\nbetween = ["localhost", "away"]\nbandwidth = "200Mbit/s"\nlatency = "5ms"\n',
        ),
    ),
}


def call(command: list[str], **variables: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def achieved_s(launch: list[str], batch: int, **variables: str) -> tuple[float, list[int]]:
    """The median step of a run, and its shares."""
    output = call(
        [*RAGTAG, "launch", *launch, *SCRIPT, "--json", "--steps", str(STEPS), "--batch", str(batch)], **variables
    )
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return statistics.median(row["wall_s"] for row in rows[SETTLED:]), rows[-1]["shares"]


def run_choice(problem: Problem, file: Path, batch: int, directory: Path) -> dict:
    """What the planner chooses, predicted and achieved."""
    choice = search(problem)
    plan = directory / "plan.json"
    save_plan(plan_file(problem, choice), plan)
    chosen = choice.best
    assert chosen.prediction is not None
    took_s, shares = achieved_s(["--plan", str(plan), "--emulate", str(file)], batch)
    return row("chosen", chosen.prediction.step_s, took_s, shares)


def row(what: str, predicted_s: float, took_s: float, shares: list[int]) -> dict:
    return {
        "what": what,
        "predicted_s": round(predicted_s, 4),
        "achieved_s": round(took_s, 4),
        "error": round(predicted_s / took_s - 1, 4),
        "shares": shares,
    }


def measure(name: str) -> list[dict]:
    """The rows of one cluster."""
    batch, text = CLUSTERS[name]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        file, profile_file = directory / f"{name}.toml", directory / "profile.json"
        file.write_text(text)
        call(
            [
                *[*RAGTAG, "profile", "--emulate", str(file), "--output", str(profile_file), "--fresh"],
                *[*SCRIPT, "--batch", str(batch)],
            ]
        )
        described, profile = load_cluster(file), load_profile(profile_file)
        problem = assemble(profile, described)
        rows = [run_choice(problem, file, batch, directory)]
        equal = price(problem, even(problem), "even")
        if equal.prediction is not None and equal.candidate is not None and not equal.candidate.left_out:
            pinned = ",".join(str(part.samples) for part in equal.candidate.parts)
            largest = str(max(part.micro_batch for part in equal.candidate.parts))
            took_s, shares = achieved_s(["--emulate", str(file), "--shares", pinned], batch, RAGTAG_MICRO_BATCH=largest)
            rows.append(row("even", equal.prediction.step_s, took_s, shares))
        last = described.expanded()[-1].name
        without, profile_without = apply_edit(f"-{last}", described, profile)
        reduced = directory / "reduced.toml"
        kept = text[: text.index(f'[[device]]\nname = "{last}"')]
        reduced.write_text(kept)
        rows.append({**run_choice(assemble(profile_without, without), reduced, batch, directory), "what": "without"})
    for each in rows:
        each["cluster"] = name
    said, was = (rows[-1][key] / rows[0][key] - 1 for key in ("predicted_s", "achieved_s"))
    rows.append({"cluster": name, "what": f"{last} adds", "predicted": round(said, 3), "achieved": round(was, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=sorted(CLUSTERS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [each for name in ([arguments.cluster] if arguments.cluster else CLUSTERS) for each in measure(name)]
    errors = [abs(each["error"]) for each in rows if "error" in each]
    summary = {"median_error": round(statistics.median(errors), 4), "worst_error": max(errors), "target": [0.05, 0.12]}
    if arguments.json:
        print(json.dumps({"rows": rows, **summary}, indent=1))
        return
    for each in rows:
        if "error" in each:
            print(
                f"{each['cluster']:10} {each['what']:8} predicted {1e3 * each['predicted_s']:6.0f} ms, achieved "
                f"{1e3 * each['achieved_s']:6.0f} ms, {each['error']:+.1%}  shares {each['shares']}"
            )
        else:
            print(
                f"{each['cluster']:10} {each['what']}: {each['predicted']:+.1%} said, {each['achieved']:+.1%} achieved"
            )
    print(f"median error {summary['median_error']:.1%}, worst {summary['worst_error']:.1%}")


if __name__ == "__main__":
    main()
