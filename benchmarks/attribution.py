#!/usr/bin/env python
"""Who is blamed when one rank is slowed down: four real processes, every rank, every cause, several sizes.

    scripts/bench attribution              # all cases, under six minutes
    scripts/bench attribution --only link  # those of one cause
    scripts/bench attribution --json

A case is right if exactly the rank that was slowed down and the cause are named within ten steps, and nobody else, and
nothing, at any time. Devices are emulated (forward and backward take 5 ms a sample, by sleeping), so the cores of this
machine hardly matter, but for those of cause "host": there one rank really computes, pinned to a core, and gets
another process beside it. Such a case is done again where the rest of the machine has taken more than a tenth of that
core from it before the onset: then it is slow for that very cause. Findings are read from the runs' own event logs.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
for path in (ROOT, ROOT / "src"):
    sys.path.insert(0, str(path))

import torch  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import ragtag  # noqa: E402
from ragtag.core.cluster import Link  # noqa: E402
from ragtag.emulate.environment import Emulator  # noqa: E402
from ragtag.emulate.link_queue import LocalQueue  # noqa: E402
from ragtag.runtime import trainer as trainer_module  # noqa: E402
from ragtag.watch.events import Finding, Step  # noqa: E402
from ragtag.watch.reader import read  # noqa: E402

RANKS, SHARE, SAMPLE_MS = 4, 8, 5.0
ONSET, AFTER = 24, 11
WITHIN = 10
TRIES = 5
_DISTURBED = 0.1
CAUSES = ("compute", "data", "link", "memory", "host")


@dataclass(frozen=True)
class Case:
    cause: str
    """One of CAUSES; or "jitter", where nobody is to be blamed."""
    how: str
    rank: int
    size: float
    onset: int
    pinned: bool
    steps: int = 0

    def __str__(self) -> str:
        begins = "from the start" if self.onset == 1 else f"from step {self.onset}"
        return f"{self.how.format(self.size)}, rank {self.rank}, {begins}, {'pinned' if self.pinned else 'followed'}"


SIZES: dict[str, tuple[tuple[str, float], ...]] = {
    "compute": (
        ("speed x {:g}", 0.75),
        ("speed x {:g}", 0.6),
        ("loss_fn sleeps {:g} ms more", 60),
        ("speed x {:g}", 0.3),
    ),
    "data": (("{:g} ms more a sample", 2), ("{:g} ms more a sample", 4), ("{:g} ms more a sample", 8)),
    "link": (("links of {:g} MB/s", 12), ("links of {:g} ms", 8), ("links of {:g} MB/s", 3), ("links of {:g} ms", 25)),
    "memory": (("memory for {:g} samples", 4), ("memory for {:g} samples", 2), ("memory for {:g} samples", 1)),
    "host": (("{:g} hog(s)", 1), ("{:g} hog(s)", 2), ("{:g} hog(s)", 3)),
}


def cases() -> list[Case]:
    every = []
    for cause in CAUSES:
        place = 0
        for rank in range(RANKS):
            for onset in (1, ONSET):
                for pinned in (True, False):
                    how, size = SIZES[cause][place % len(SIZES[cause])]
                    every.append(Case(cause=cause, how=how, size=size, rank=rank, onset=onset, pinned=pinned))
                    place += 1 + (place % 4 == 3)  # or the same sizes would always meet the same onsets
    every += [Case("jitter", "jitter of {:g}", -1, 0.3, 0, pinned, steps=100) for pinned in (True, False)]
    return every


@dataclass
class Result:
    case: Case
    named: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Step, rank, cause and text of every finding."""
    step_ms: float = 0.0
    disturbed: bool = False
    """Other work of this machine was in the way before there was anything to be found."""

    @property
    def right(self) -> bool:
        case = self.case
        if case.cause == "jitter":
            return not self.named
        right = [step for step, rank, cause, _ in self.named if (rank, cause) == (case.rank, case.cause)]
        return len(right) == len(self.named) > 0 and case.onset <= right[0] < case.onset + WITHIN


# ---- one rank


def train(many: list[Case], directory: str) -> None:
    """All of `many`, one after another, in this process, which is a rank."""
    torch.set_num_threads(1)
    for number, case in enumerate(many):
        with suppress(ProcessLookupError), restored_affinity():
            train_case(case, Path(directory) / f"{number}.jsonl", Path(directory) / f"{number}.toml")


def train_case(case: Case, log: Path, cluster: Path) -> None:
    rank, run, emulators = int(os.environ["RANK"]), None, []
    really = case.cause == "host"
    if rank == 0:
        cluster.with_suffix(".new").write_text(cluster_of(case))
        os.replace(cluster.with_suffix(".new"), cluster)
    while not cluster.exists():
        time.sleep(0.001)

    def emulator(environ: Any, number: int) -> Emulator | None:
        emulators.append(real_emulator({**environ, "RAGTAG_EMULATE": str(cluster)}, number))
        return emulators[-1]

    real_emulator = trainer_module.from_environment
    torch.manual_seed(1)
    # Where memory is the cause, activations need most of it; where links are, gradients are worth sending.
    width, length = (32, 48) if case.cause == "memory" else (96, 1)
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())])
    slowed = rank == case.rank

    def begun() -> bool:
        return (run is None and case.onset == 1) or (run is not None and run.committed + 1 >= case.onset)

    class Data(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if case.cause == "data":
                time.sleep(0.2e-3 + (1e-3 * case.size if slowed and begun() else 0.0))
            return super().__getitem__(index)

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        (x,) = batch
        if really and slowed:
            busy_for(1e-3 * SAMPLE_MS * len(x))
        elif really:
            time.sleep(1e-3 * SAMPLE_MS * len(x))
        elif slowed and case.cause == "compute" and "sleeps" in case.how and begun():
            time.sleep(1e-3 * (case.size + SAMPLE_MS * len(x)))
        return (model(x) - x).square().mean()

    if really:
        os.sched_setaffinity(0, {0 if slowed else 1})
    data = Data(torch.randn(256, length, width))
    with mock.patch.object(trainer_module, "from_environment", emulator) if not really else mock.MagicMock():
        trainer = ragtag.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            loss_fn,
            data,
            global_batch_size=RANKS * SHARE,
            shares=(SHARE,) * RANKS if case.pinned else None,
            config=ragtag.Config(log=str(log), patience_s=30.0, bucket_bytes=64 << 10),
        )
    run = trainer._run
    steps = case.steps or max(case.onset, 5) + AFTER
    before = counters()
    with hogs(case, slowed) as begin:
        for number in range(1, steps + 1):
            if number == case.onset:
                ran_s, waited_s = (now - then for now, then in zip(counters(), before))
                if really and slowed and case.onset > 1 and waited_s > _DISTURBED * (ran_s + waited_s):
                    log.with_suffix(".disturbed").touch()
                slow_down(case, run, emulators[0] if emulators else None, slowed)
                begin()
            next(iter(trainer.steps(1)))
    trainer.close()


def cluster_of(case: Case) -> str:
    """Four equal devices on four hosts; the slowed one's speed changes where that is the cause."""
    lines = ["[emulate]", f"sample_ms = {SAMPLE_MS}", "micro_batch_ms = 4" if case.cause == "memory" else ""]
    lines += ["jitter = 0.3"] if case.cause == "jitter" else []
    for rank in range(RANKS):
        lines += ["[[device]]", f'name = "dev{rank}"', f'host = "host{rank}"']
        lines += ['memory = "1 GiB"'] if case.cause == "memory" else []
        if case.cause == "compute" and rank == case.rank and "speed" in case.how:
            lines += ['drift_kind = "step"', f"drift = [{{ step = {case.onset}, speed = {case.size} }}]"]
    if case.cause == "link":
        for rank in range(RANKS):
            for other in range(rank):
                lines += ["[[link]]", f'between = ["host{other}", "host{rank}"]', 'bandwidth = "10 GB/s"']
    return "\n".join(lines) + "\n"


def slow_down(case: Case, run: Any, emulator: Emulator | None, slowed: bool) -> None:
    """What begins with the case's first slow step, on this rank."""
    if case.cause == "link":
        assert emulator is not None
        for host, queue in emulator._queues.items():
            if slowed or host == f"host{case.rank}":
                assert isinstance(queue, LocalQueue)
                bandwidth, latency_s = (1e6 * case.size, 0.0) if "MB" in case.how else (None, 1e-3 * case.size)
                between = (emulator.device.host, host)
                queue._link = Link(between=between, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    if case.cause == "memory" and slowed:
        memory, parameters = run.memory, sum(p.nbytes for p in run.model.parameters())
        with memory.forward_backward():
            loss = run.model(torch.zeros(SHARE, 48, 32)).square().mean()
            sample_bytes = memory._activations.num_bytes / SHARE
            del loss
        memory.cap_bytes = int(2 * parameters + sample_bytes * (case.size + 0.5))


@contextmanager
def hogs(case: Case, slowed: bool) -> Iterator[Callable[[], None]]:
    """Give a function that starts processes that compute for ever on this one's core; they end with the block."""
    started: list[int] = []

    def begin() -> None:
        for _ in range(round(case.size) if case.cause == "host" and slowed else 0):
            started.append(os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "while True: pass"], os.environ))

    try:
        yield begin
    finally:
        for process in started:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@contextmanager
def restored_affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def counters() -> tuple[float, float]:
    """Seconds that this thread has run, and that it has waited for its core."""
    ran, waited, *_ = Path("/proc/thread-self/schedstat").read_text().split()
    return 1e-9 * int(ran), 1e-9 * int(waited)


def busy_for(cpu_s: float) -> None:
    """Compute for so many seconds of processor time."""
    began_s, x = time.thread_time(), torch.ones(64, 64)
    while time.thread_time() - began_s < cpu_s:
        x = x @ x * 1e-3


# ---- all of them


def results_of(many: list[Case], directory: str) -> list[Result]:
    results = []
    for number, case in enumerate(many):
        result = Result(case)
        walls: list[float] = []
        known: set[tuple[int, str, int]] = set()
        for event in read(Path(directory) / f"{number}.jsonl"):
            if isinstance(event, Finding) and not event.over:
                said = (event.rank, event.cause, event.since_step)
                if said not in known:  # else it is told again, since it costs more
                    result.named.append((event.step, event.rank, event.cause, event.text))
                known.add(said)
            elif isinstance(event, Step):
                walls.append(event.wall_s)
        result.step_ms = 1e3 * sorted(walls)[len(walls) // 2]
        result.disturbed = (Path(directory) / f"{number}.disturbed").exists()
        results.append(result)
    return results


def run_cases(many: list[Case]) -> list[Result]:
    """All of `many`, in one set of processes; those that were disturbed a few times more."""
    done: dict[Case, Result] = {}
    for _ in range(TRIES):
        left = [case for case in many if case not in done or done[case].disturbed]
        if left:
            with tempfile.TemporaryDirectory() as directory:
                run_ranks(RANKS, train, left, directory, timeout=60.0 + 8.0 * len(left))
                done.update({result.case: result for result in results_of(left, directory)})
    return [done[case] for case in many]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*CAUSES, "jitter"], action="append", help="cases of one cause only")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    began_s, all_results = time.monotonic(), []
    for cause in (*CAUSES, "jitter"):
        if options.only and cause not in options.only:
            continue
        for result in run_cases([case for case in cases() if case.cause == cause]):
            all_results.append(result)
            if not options.json:
                told = "; ".join(f"step {step}: {cause}, {text}" for step, _, cause, text in result.named)
                verdict = "right" if result.right else "DISTURBED" if result.disturbed else "WRONG"
                print(f"{verdict}  {result.case}: {told or 'nobody'}", flush=True)
    right = sum(result.right for result in all_results)
    if options.json:
        rows = [{**asdict(result), "right": result.right} for result in all_results]
        print(json.dumps({"right": right, "cases": len(all_results), "rows": rows}))
    else:
        percent = 100 * right / len(all_results)
        disturbed = sum(result.disturbed and not result.right for result in all_results)
        print(
            f"{right} of {len(all_results)} right: {percent:.1f} %, in {time.monotonic() - began_s:.0f} s; "
            f"of the others {disturbed} were disturbed by other work of this machine"
        )
    return 0


if __name__ == "__main__":
    multiprocessing.freeze_support()
    sys.exit(main())
