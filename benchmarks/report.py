"""How long `ragtag report` takes for a long log, and how much memory.

    scripts/bench report [--steps 1000000] [--ranks 8] [--json]

Writes a log as a run would, of equal steps with noise, and reads it as the command does, in a process of its own. Time
is that of the process, from its start to its end, on one core; memory its largest resident size.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from ragtag.watch.events import Began, Member, Members, Planned, Step
from ragtag.watch.log_file import LogFile


def write_log(path: Path, steps: int, ranks: int) -> None:
    luck = random.Random(1)
    names = tuple(Member(name=f"host{rank // 4}/{rank % 4}", host=f"host{rank // 4}") for rank in range(ranks))
    shares = tuple(32 - rank % 5 for rank in range(ranks))
    rows = []
    for _ in range(500):
        compute = tuple(round(luck.uniform(0.4, 0.5), 6) for _ in range(ranks))
        longest = max(compute)
        rows.append((compute, tuple(round(longest - each, 6) for each in compute), round(longest + 0.03, 6)))
    encode = msgspec.json.Encoder().encode
    with LogFile(path) as file:
        file.append([encode(Began(run="long", global_batch_size=sum(shares))), encode(Members(step=0, ranks=names))])
        file.append([encode(Planned(step=0, id="0123456789ab", shares=shares, micro_batch=shares))])
        batch = []
        for number in range(1, steps + 1):
            compute_s, wait_s, wall_s = rows[number % 500]
            step = Step(
                t=round(1.8e9 + number * 0.5, 3),
                number=number,
                loss=5.0 / (1 + number / steps * 10) + luck.gauss(0, 0.05),
                grad_norm=luck.uniform(0.5, 2.0),
                lr=1e-3,
                samples=sum(shares),
                weight=float(sum(shares)),
                wall_s=wall_s,
                predicted_s=0.53,
                eta=round(luck.uniform(0.9, 0.99), 5),
                shares=shares,
                compute_s=compute_s,
                data_s=(0.001,) * ranks,
                wait_s=wait_s,
                apply_s=(0.01,) * ranks,
                comm_s=0.02,
                plan="0123456789ab",
                generation=1,
            )
            batch.append(encode(step))
            if len(batch) == 1000:
                file.append(batch)
                batch = []
        file.append(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log.jsonl"
        write_log(log, arguments.steps, arguments.ranks)
        megabytes = sum(file.stat().st_size for file in Path(directory).iterdir()) / 1e6
        began_s = time.perf_counter()
        command = [sys.executable, "-m", "ragtag.cli.main", "report", str(log), "--output", f"{directory}/report.html"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began_s
        assert status == 0, process.stderr and process.stderr.read()
    row = {
        "steps": arguments.steps,
        "ranks": arguments.ranks,
        "log_mb": round(megabytes, 1),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "memory_mb": round(usage.ru_maxrss / 1e3, 1),
        "target_s": 10,
    }
    if arguments.json:
        print(json.dumps(row))
    else:
        print(
            f"{row['steps']:,} steps of {row['ranks']} ranks, {row['log_mb']} MB: {row['wall_s']} s "
            f"({row['cpu_s']} s of processor), {row['memory_mb']} MB"
        )


if __name__ == "__main__":
    main()
