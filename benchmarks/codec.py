"""How fast numbers are made int4 and back, on one core, beside a plain copy of the same bytes.

    scripts/bench codec [--json]

GB/s of fp32, the median of the rounds; each round takes a copy, an encoding and a decoding in turn, so other work on
the machine is in all three. Decoding is measured into memory that was used before and into fresh memory, whose pages
the system hands out one by one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from ragtag.outer.codec import decode, encode

SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)


def seconds(action: Callable[[], object], repeats: int) -> float:
    began_s = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - began_s) / repeats


def measured(numel: int, rounds: int) -> dict[str, float]:
    flat, copy, out = torch.randn(numel), torch.empty(numel), torch.empty(numel)
    data = encode("int4", flat)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: copy.copy_(flat),
        "encode": lambda: encode("int4", flat),
        "decode": lambda: decode("int4", data, numel, out=out),
        "decode_fresh": lambda: decode("int4", data, numel),
    }
    repeats = max(1, (1 << 24) // numel)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(seconds(way, repeats))
    return {name: 4 * numel / statistics.median(each) / 1e9 for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object a size")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for numel in SIZES:
        row = measured(numel, arguments.rounds)
        if arguments.json:
            print(json.dumps({"numel": numel, **row}))
        else:
            figures = ", ".join(f"{name.replace('_', ' ')} {rate:.2f}" for name, rate in row.items())
            print(f"{numel:>10,} numbers, GB/s of fp32: {figures}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
