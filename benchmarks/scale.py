"""Simulated scale study: eta and wasted device-hours of even DDP, dropping stragglers and ragtag on 4 to 4,096 devices.

    scripts/bench scale            # the table of docs/scale.md, in virtual time
    scripts/bench scale --write    # writes it, and its plots, into docs/
    scripts/bench scale --most 256 --json

Devices are drawn host by host from a mix of what people own and rent; each fails once in 100 hours on average and is
back after ten minutes. See docs/scale.md for what is assumed.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragtag.core.cluster import Cluster, Device, Emulation, Link
from ragtag.sim.cluster import VirtualCluster, virtual_cluster
from ragtag.sim.membership import failures
from ragtag.sim.run import Way, simulate

BEGIN, END = "<!-- scripts/bench scale --write -->", "<!-- end -->"
DOCS = Path(__file__).parents[1] / "docs"
HOURS = {4: 1.0, 16: 1.0, 64: 1.0, 256: 1.0, 1024: 0.5, 4096: 0.25}
"""Virtual hours by number of devices: each has some failures, and all together run for less than two minutes."""
FAILURES_PER_HOUR = 0.01
REPAIR_S = 600.0
FAILURE_SEED = 2
"""Draws about as many failures as are to be expected: 10 on 4,096 devices."""
SAMPLES_A_DEVICE = 32
MIX = (
    # kind, speed, devices a host, part of the hosts
    ("a100", 2.2, 8, 0.15),
    ("rtx4090", 1.8, 4, 0.20),
    ("rtx3090", 1.0, 4, 0.30),
    ("rtx2080ti", 0.55, 4, 0.20),
    ("p40", 0.3, 4, 0.15),
)
SHOWN: dict[Way, str] = {
    "even DDP": "#d4553f",
    "dropping stragglers": "#8a6fc9",
    "ragtag, restarting": "#7fb2ec",
    "ragtag": "#1f6fd6",
}


def mixed_cluster(num_devices: int, seed: int = 0) -> VirtualCluster:
    """Return `num_devices` devices of the mix, in the order in which hosts were drawn."""
    draws = random.Random(seed)
    devices: list[Device] = []
    hosts = []
    while len(devices) < num_devices:
        # Small clusters are not a single host of one kind.
        kind, speed, count, _ = draws.choices(MIX, [part for *_, part in MIX])[0]
        count = min(count, num_devices - len(devices), max(1, num_devices // 4))
        hosts.append(f"host{len(hosts)}")
        # No two devices of a kind are quite alike.
        devices += [
            Device(name=f"{hosts[-1]}-{kind}-{i}", host=hosts[-1], kind=kind, speed=speed * draws.uniform(0.9, 1.0))
            for i in range(count)
        ]
    counts = Counter(device.host for device in devices)
    pairs = [pair for pair in zip(hosts, [*hosts[1:], hosts[0]]) if pair[0] != pair[1]]
    links = [Link(between=pair, bandwidth_bytes_per_s=10e9 / 8, latency_s=50e-6) for pair in pairs]
    # Each device has its own lanes to its neighbour.
    links += [Link(between=(host, host), bandwidth_bytes_per_s=12e9 * counts[host], latency_s=20e-6) for host in counts]
    costs = Emulation(sample_s=0.05, optimizer_s=0.01, fixed_s=0.005, jitter=0.05, seed=seed)
    return virtual_cluster(
        Cluster(devices=tuple(devices), links=tuple(links), emulation=costs),
        batch=SAMPLES_A_DEVICE * num_devices,
        gradient_bytes=100_000_000,
        bucket_bytes=100_000_000,
    )


def measure(num_devices: int, *, hours: float, progress: bool = False) -> list[dict[str, Any]]:
    cluster = mixed_cluster(num_devices)
    changes = failures(
        num_devices,
        duration_s=hours * 3600,
        failures_per_hour=FAILURES_PER_HOUR,
        repair_s=REPAIR_S,
        seed=FAILURE_SEED,
    )
    rows = []
    for way in SHOWN:
        started_s = time.process_time()
        result = simulate(way, cluster, duration_s=hours * 3600, changes=changes)
        rows.append(
            {
                "devices": num_devices,
                "hours": hours,
                "way": way,
                "eta": round(result.eta, 4),
                "wasted_device_hours": round(result.wasted_device_hours, 2),
                "device_hours": round(result.device_hours, 2),
                "steps": result.steps,
                "step_s": round(result.wall_s / max(result.steps, 1), 3),
                "failures": sum(not change.joins for change in changes),
                "lost_s": round(result.lost_s, 1),
                "decisions": len(result.decisions),
                "cpu_s": round(time.process_time() - started_s, 2),
            }
        )
        if progress:
            print(f"{num_devices} devices, {way}: eta {result.eta:.3f}", file=sys.stderr)
    return rows


def wasted(row: dict[str, Any]) -> float:
    """Part of the device-hours."""
    return row["wasted_device_hours"] / row["device_hours"]


def table(rows: list[dict[str, Any]]) -> str:
    head = " | ".join(f"{way}: eta, wasted" for way in SHOWN)
    lines = [f"| devices | hours | failures | {head} |", "|---" * (len(SHOWN) + 3) + "|"]
    for size in sorted({row["devices"] for row in rows}):
        same = {row["way"]: row for row in rows if row["devices"] == size}
        cells = []
        for way in SHOWN:
            row = same[way]
            cells.append(f"{row['eta']:.3f}, {row['wasted_device_hours']:,.1f} h ({100 * wasted(row):.0f} %)")
        ours = same["ragtag"]
        lines.append(f"| {size:,} | {ours['hours']:g} | {ours['failures']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], title: str, value: Callable[[dict[str, Any]], float]) -> str:
    """Return an SVG of `value`, from 0 to 1, against the number of devices."""
    width, height, left, right, top, bottom = 720, 380, 60, 190, 40, 50
    sizes = sorted({row["devices"] for row in rows})
    first, last = math.log2(sizes[0]), max(math.log2(sizes[-1]), math.log2(sizes[0]) + 1)

    def x(size: int) -> float:
        return left + (width - left - right) * (math.log2(size) - first) / (last - first)

    def y(number: float) -> float:
        return height - bottom - (height - top - bottom) * number

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><title>{title}</title><rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="22" font-size="15" font-weight="600" fill="#16202e">{title}</text>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<path d="M{left} {at:.1f}H{width - right}" stroke="#d5dae2"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#5c6778">{tenth / 10:g}</text>')
    for size in sizes:
        parts.append(
            f'<text x="{x(size):.1f}" y="{height - bottom + 20}" text-anchor="middle" fill="#5c6778">{size:,}</text>'
        )
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle" fill="#5c6778">devices</text>')
    labels: list[float] = []
    ends: dict[Way, float] = {}
    for way in SHOWN:
        ends[way] = next(value(row) for row in rows if (row["devices"], row["way"]) == (sizes[-1], way))
    for way, end in sorted(ends.items(), key=lambda item: -item[1]):
        points = [(row["devices"], value(row)) for row in rows if row["way"] == way]
        drawn = " ".join(f"{x(size):.1f},{y(number):.1f}" for size, number in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{SHOWN[way]}" stroke-width="2.5"/>')
        labels.append(max(y(end) + 4, labels[-1] + 17) if labels else y(end) + 4)
        parts.append(f'<text x="{width - right + 10}" y="{labels[-1]:.1f}" fill="{SHOWN[way]}">{way}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(rows: list[dict[str, Any]]) -> None:
    """Put the table between the markers of docs/scale.md, and the plots beside it."""
    page = DOCS / "scale.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}", encoding="utf-8")
    (DOCS / "scale_eta.svg").write_text(plot(rows, "eta: part of the devices' own speed", lambda row: row["eta"]))
    (DOCS / "scale_waste.svg").write_text(plot(rows, "part of device-hours wasted", wasted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=max(HOURS), help="largest number of devices")
    parser.add_argument("--write", action="store_true", help="into docs/")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    started_s, began_s = time.process_time(), time.perf_counter()
    rows = []
    for size, hours in HOURS.items():
        if size <= arguments.most:
            rows += measure(size, hours=hours, progress=True)
    if arguments.write:
        write(rows)
    print(json.dumps(rows) if arguments.json else table(rows))
    wall_s = time.perf_counter() - began_s
    print(f"{time.process_time() - started_s:.1f} s of processor time, {wall_s:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
