"""How near the cost model comes: predicted against achieved step times of emulated runs, on unequal clusters.

    scripts/bench predictions
    scripts/bench predictions --cluster link --json
    scripts/bench predictions --cluster tbf             # two network namespaces (scripts/netns); needs root

For each cluster `ragtag profile` measures it, and the planner prices its own choice, an even split, and the best plan
without (or, where it left it out, with) the last device. Each is run with the same script, its shares pinned; achieved
is the median of the last steps. The verdict on the last device is held against two of these runs. `ragtag simulate` is
held against the even split, and against a run that starts equal and follows speeds by itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ragtag.cli.cluster_toml import to_toml
from ragtag.core.cluster import Cluster
from ragtag.core.cluster_file import load_cluster
from ragtag.core.profile import load_profile
from ragtag.cost.candidate import Candidate
from ragtag.cost.device import largest_micro_batch
from ragtag.cost.problem import Problem, assemble
from ragtag.plan.replicated import Solver, even
from ragtag.plan.search import REPLICATED, Priced, price, search
from ragtag.plan.what_if import apply_edit

RAGTAG = [sys.executable, "-m", "ragtag.cli.main"]
SCRIPT = ["-m", "ragtag.examples.byte_gpt"]
NETNS = Path(__file__).resolve().parent.parent / "scripts" / "netns"
STEPS, SETTLED = 14, 5
LIMIT_S = 300
DEVICE = '[[device]]\nname = "device{}"\nspeed = {}\n'
LINK = '[[link]]\nbetween = ["localhost", "away"]\nbandwidth = "{}"\nlatency = "{}"\n'
TARGETS = {"emulated": [0.05, 0.12], "tbf": [0.08, 0.20]}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster, and how its hosts are joined."""

    batch: int
    text: str
    rate: str = ""
    """Each host is a network namespace behind a `tbf` of this rate; empty: all on this machine, links emulated."""


def cluster(speeds: tuple[float, ...], emulate: str, extra: dict[int, str] | None = None, rest: str = "") -> str:
    devices = [DEVICE.format(number, speed) + (extra or {}).get(number, "") for number, speed in enumerate(speeds)]
    return "\n".join([f"[emulate]\n{emulate}", *devices, rest])


AWAY = {2: 'host = "away"\n'}
CASES = {
    "four": Case(batch=44, text=cluster((1, 1, 0.5, 0.25), "sample_ms = 40")),
    "tenth": Case(batch=42, text=cluster((1, 1, 0.1), "sample_ms = 40")),
    "optimizer": Case(batch=18, text=cluster((1, 1, 0.25), "sample_ms = 40\noptimizer_ms = 22\nfixed_ms = 10")),
    "memory": Case(
        batch=32, text=cluster((1, 1, 0.5), "sample_ms = 40\nmicro_batch_ms = 20", {0: 'memory = "60MB"\n'})
    ),
    "link": Case(batch=32, text=cluster((1, 0.5, 1), "sample_ms = 40", AWAY, LINK.format("200Mbit/s", "5ms"))),
    "slower-link": Case(batch=32, text=cluster((1, 1, 0.5), "sample_ms = 40", AWAY, LINK.format("60Mbit/s", "10ms"))),
    "tbf": Case(batch=32, text=cluster((1, 0.5, 1), "sample_ms = 40", AWAY), rate="200mbit"),
}


def call(command: list[str], **variables: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S).stdout


@contextmanager
def namespaces(described: Cluster, rate: str) -> Iterator[dict[str, str]]:
    """By host, the network namespace that it is; none where links are emulated."""
    hosts = list(dict.fromkeys(device.host for device in described.expanded())) if rate else []
    name = f"pred{os.getpid() % 1000}-"
    if hosts:
        subprocess.run([NETNS, "up", str(len(hosts)), rate, name], check=True)
    try:
        yield {host: f"{name}{number}" for number, host in enumerate(hosts)}
    finally:
        if hosts:
            subprocess.run([NETNS, "down", str(len(hosts)), name], check=True)


def run_workers(described: Cluster, where: dict[str, str], arguments: list[str], variables: dict[str, str]) -> str:
    """Start a worker for each device in its host's namespace, as another launcher would; return what rank 0 printed."""
    devices = described.expanded()
    processes: list[subprocess.Popen[str]] = []
    for rank, device in enumerate(devices):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(devices))}
        meet = {"MASTER_ADDR": "10.99.7.10", "MASTER_PORT": "29555", "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", where[device.host], sys.executable, *SCRIPT, *arguments],
                env={**os.environ, **place, **meet, **variables},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        output = processes[0].communicate(timeout=LIMIT_S)[0]
        failed = [rank for rank, process in enumerate(processes) if process.wait(timeout=30)]
        if failed:
            raise SystemExit(f"ranks {failed} failed")
        return output
    finally:
        for process in processes:
            process.kill()


class Bench:
    """One cluster while it is measured."""

    def __init__(self, case: Case, described: Cluster, where: dict[str, str], directory: Path) -> None:
        self._case, self.described, self._where, self._directory = case, described, where, directory

    def profile(self, file: Path) -> None:
        """Measure the cluster into `file`."""
        arguments = ["--batch", str(self._case.batch)]
        if self._where:
            emulated = str(self._file(self.described))
            variables = {"RAGTAG_PROFILE": str(file), "RAGTAG_PROFILE_FRESH": "1", "RAGTAG_EMULATE": emulated}
            run_workers(self.described, self._where, arguments, variables)
        else:
            emulated = str(self._file(self.described))
            call([*RAGTAG, "profile", "--emulate", emulated, "--output", str(file), "--fresh", *SCRIPT, *arguments])

    def achieved(
        self, left_out: Sequence[str] = (), shares: Sequence[int] | None = None, micro_batch: int | None = None
    ) -> dict:
        """Medians of the last steps of a run; without `shares` it follows speeds."""
        devices = tuple(device for device in self.described.expanded() if device.name not in left_out)
        hosts = {device.host for device in devices}
        links = tuple(link for link in self.described.links if set(link.between) <= hosts)
        taking_part = msgspec.structs.replace(self.described, devices=devices, links=links)
        file = self._file(taking_part)
        variables = {} if micro_batch is None else {"RAGTAG_MICRO_BATCH": str(micro_batch)}
        arguments = ["--json", "--steps", str(STEPS), "--batch", str(self._case.batch)]
        if self._where:
            variables["RAGTAG_EMULATE"] = str(file)
            if shares is not None:
                variables["RAGTAG_SHARES"] = ",".join(map(str, shares))
            output = run_workers(taking_part, self._where, arguments, variables)
        else:
            pinned = [] if shares is None else ["--shares", ",".join(map(str, shares))]
            output = call(
                [*RAGTAG, "launch", "--fixed", "--no-page", "--emulate", str(file), *pinned, *SCRIPT, *arguments],
                **variables,
            )
        rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')][SETTLED:]
        return {
            "step_s": statistics.median(row["wall_s"] for row in rows),
            "comm_s": statistics.median(row["comm_s"] for row in rows),
            "shares": rows[-1]["shares"],
            "wait_s": [statistics.median(times) for times in zip(*(row["wait_s"] for row in rows))],
        }

    def simulated(self, profile_file: Path) -> dict[str, float]:
        """By way of training, the median of the last steps that `ragtag simulate` makes."""
        file = str(self._file(self.described))
        output = call([*RAGTAG, "simulate", file, "--profile", str(profile_file), "--steps", str(STEPS), "--json"])
        return {
            way["name"]: statistics.median(step["wall_s"] for step in way["last_steps"][SETTLED:])
            for way in json.loads(output)["ways"]
        }

    def _file(self, described: Cluster) -> Path:
        file = self._directory / f"{len(list(self._directory.iterdir()))}.toml"
        file.write_text(to_toml(described))
        return file


def common_micro_batch(candidate: Candidate) -> int | None:
    """The size that limits any rank; None: whole shares at once."""
    return min((part.micro_batch for part in candidate.parts if part.micro_batch < part.samples), default=None)


def row(what: str, predicted_s: float, achieved: dict, comm_s: float | None = None) -> dict:
    return {
        "what": what,
        "predicted_s": round(predicted_s, 4),
        "achieved_s": round(achieved["step_s"], 4),
        "error": round(predicted_s / achieved["step_s"] - 1, 4),
        "shares": achieved["shares"],
        **({} if comm_s is None else {"predicted_comm_s": round(comm_s, 4)}),
        "comm_s": round(achieved["comm_s"], 4),
        "wait_s": [round(seconds, 4) for seconds in achieved["wait_s"]],
    }


def planned(bench: Bench, what: str, priced: Priced, left_out: Sequence[str] = ()) -> dict:
    """A plan, predicted and achieved; `left_out` besides those that it leaves out itself."""
    candidate, prediction = priced.candidate, priced.prediction
    assert candidate is not None
    assert prediction is not None
    shares = [part.samples for part in candidate.parts]
    out = {*candidate.left_out, *left_out}
    achieved = bench.achieved(tuple(out), shares, common_micro_batch(candidate))
    return row(what, prediction.step_s, achieved, prediction.comm_s)


def with_and_without(bench: Bench, problem: Problem, profile_file: Path) -> list[dict]:
    """The planner's choice, and the best plan with the last device where that left it out, without it otherwise."""
    last = bench.described.expanded()[-1].name
    best = search(problem).best
    assert best.candidate is not None
    chosen = planned(bench, "chosen", best)
    if last in best.candidate.left_out:
        everybody = Solver(problem, REPLICATED).candidate(tuple(range(len(problem.ranks))))
        other = planned(bench, "with", price(problem, everybody, "with"))
        pair = other, chosen
    else:
        reduced, profile = apply_edit(f"-{last}", bench.described, load_profile(profile_file))
        other = planned(bench, "without", search(assemble(profile, reduced)).best, (last,))
        pair = chosen, other
    said, was = (pair[1][key] / pair[0][key] - 1 for key in ("predicted_s", "achieved_s"))
    return [chosen, other, {"what": f"{last} adds", "predicted": round(said, 3), "achieved": round(was, 3)}]


def measure(name: str, keep: Path | None) -> list[dict]:
    """The rows of one cluster."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        file = directory / "cluster.toml"
        file.write_text(case.text)
        profile_file = (keep or directory) / f"{name}.json"
        described = load_cluster(file)
        with namespaces(described, case.rate) as where:
            bench = Bench(case, described, where, directory)
            bench.profile(profile_file)
            problem = assemble(load_profile(profile_file), described)
            rows = with_and_without(bench, problem, profile_file)
            equal = price(problem, even(problem), "even")
            sizes = [size for size in map(largest_micro_batch, problem.alike) if size is not None]
            following = bench.achieved(micro_batch=min(sizes, default=None))
            simulated = bench.simulated(profile_file)
            if equal.candidate is not None:
                rows.append(planned(bench, "even", equal))
                rows.append({**rows[-1], "what": "even, simulated", "predicted_s": round(simulated["even DDP"], 4)})
                rows[-1]["error"] = round(rows[-1]["predicted_s"] / rows[-1]["achieved_s"] - 1, 4)
            rows.append(row("following, simulated", simulated["ragtag"], following))
    return [{"cluster": name, **each} for each in rows]


def summary(rows: list[dict]) -> dict:
    """Median and worst errors by kind of cluster, predicted and simulated apart."""
    found = {}
    for kind, target in TARGETS.items():
        for source in ("predicted", "simulated"):
            errors = [
                abs(each["error"])
                for each in rows
                if "error" in each
                and (CASES[each["cluster"]].rate != "") == (kind == "tbf")
                and each["what"].endswith("simulated") == (source == "simulated")
            ]
            if errors:
                middle = round(statistics.median(errors), 4)
                found[f"{kind}, {source}"] = {"median": middle, "worst": max(errors), "target": target}
    apart = [abs(each["predicted"] - each["achieved"]) for each in rows if "predicted" in each]
    if apart:
        found["verdicts"] = {"worst_points": round(100 * max(apart), 1), "target": 5}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=sorted(CASES), action="append", help="one of them; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="put the profiles here")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rows = [each for name in arguments.cluster or CASES for each in measure(name, arguments.keep)]
    if arguments.json:
        print(json.dumps({"rows": rows, "summary": summary(rows)}, indent=1))
        return
    for each in rows:
        if "error" in each:
            print(
                f"{each['cluster']:11} {each['what']:20} predicted {1e3 * each['predicted_s']:6.0f} ms, achieved "
                f"{1e3 * each['achieved_s']:6.0f} ms, {each['error']:+.1%}  shares {each['shares']}"
            )
        else:
            said, was = each["predicted"], each["achieved"]
            print(f"{each['cluster']:11} {each['what']}: {said:+.1%} said, {was:+.1%} achieved")
    for what, figures in summary(rows).items():
        print(what, json.dumps(figures))


if __name__ == "__main__":
    main()
