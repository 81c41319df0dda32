"""What the outer process of many islands needs: bytes by formula, and its memory measured.

    scripts/bench islands_scale                  # memory of a real outer process, with 2 and 8 islands
    scripts/bench islands_scale --table [--write]   # the table of docs/scale.md

Measured is a process as `ragtag launch --island` starts it, over its socket: islands give values, send int4 differences
of all fragments and fetch what merges have changed, for some rounds. Its peak resident memory, less what it had before
it was given anything, is told in multiples of the model in fp32.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

import ragtag
from ragtag.core.quantities import format_bytes
from ragtag.hub.relay import LENGTH, Introduction
from ragtag.outer.codec import encoded_bytes
from ragtag.outer.protocol import Attach, Beat, Wanted
from ragtag.outer.talk import Talk

DOCS = Path(__file__).resolve().parent.parent / "docs"
FRAGMENTS = 4
INNER_STEPS = 30
STEP_S = 1.0
SIZES = (("1 M", 10**6), ("100 M", 10**8), ("1 B", 10**9), ("7 B", 7 * 10**9), ("70 B", 70 * 10**9))
ISLANDS = (2, 8, 32, 128)


class Island:
    """One that trains nothing, but says what one that trains would."""

    def __init__(self, name: str, numel: tuple[int, ...]) -> None:
        self.numel = numel
        about = {"run": "r", "version": ragtag.__version__, "model": "m", "numel": numel, "batch": 8}
        self.talk = Talk(
            lambda: Attach(island=name, session=name, wanted=Wanted(inner_steps=10), training=True, **about),
            where="the benchmark",
        )

    async def connect(self, path: str) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(path, limit=1 << 20)
        self._send(msgspec.json.encode(Introduction(caller="benchmark")))
        self._send(self.talk.begin())
        self._receiving = asyncio.ensure_future(self._receive())

    def _send(self, message: bytes) -> None:
        self._writer.writelines((LENGTH.pack(len(message)), message))

    async def _receive(self) -> None:
        while True:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            self.talk.heard(await self._reader.readexactly(length))

    async def until(self, ready) -> None:
        """Send what there is to send until something is so."""
        while not ready():
            if self._receiving.done():
                self._receiving.result()
            message = self.talk.next_message()
            if message is None:
                await asyncio.sleep(0.002)
            else:
                self._send(message)
                await self._writer.drain()

    async def round(self) -> None:
        """Send one fragment after the other, as islands do, and take what becomes of each."""
        values = self.talk.values
        for fragment, numel in enumerate(self.numel):
            assert values.reserve(fragment)
            before = values.versions[fragment]
            own = values.values[fragment] + 1e-3 * torch.rand(numel)
            self.talk.send(fragment, own, tokens=8.0, samples=8, steps=1, step=1, codec="int4")
            await self.until(lambda at=fragment, then=before: values.versions[at] > then)
            while arrivals := values.arrivals:
                values.added(list(arrivals))

    def close(self) -> None:
        self._receiving.cancel()
        self._writer.close()


async def rounds(path: str, num_islands: int, numel: tuple[int, ...], count: int) -> None:
    islands = [Island(f"i{number}", numel) for number in range(num_islands)]
    first = islands[0]
    await first.connect(path)
    await first.until(lambda: first.talk.stage == "alone")
    first.talk.give([torch.zeros(each) for each in numel], b"state", step=0)
    await first.until(lambda: first.talk.stage == "open")
    for island in islands[1:]:
        await island.connect(path)
        await island.until(lambda island=island: island.talk.stage == "open")
        island.talk.fetch_all()
        await island.until(lambda island=island: island.talk.values.begun)
    for island in islands:
        island.talk.say(Beat(step=0, training=True))
    for _ in range(count):
        await asyncio.gather(*(island.round() for island in islands))
    for island in islands:
        island.close()


def peak_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/{pid}/status has no {name}")


def measured(num_islands: int, total: int, count: int) -> dict[str, float]:
    """Peak memory of one outer process."""
    numel = tuple([total // FRAGMENTS] * FRAGMENTS)
    with tempfile.TemporaryDirectory(prefix="ragtag-") as directory, socket.socket(socket.AF_UNIX) as listener:
        path = f"{directory}/outer"
        listener.bind(path)
        listener.listen(64)
        words = ["--fd", str(listener.fileno()), "--run", "r", "--run-dir", f"{directory}/run", "--quiet"]
        (Path(directory) / "run").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", "ragtag.outer", *words], pass_fds=[listener.fileno()], env=dict(os.environ)
        )
        try:
            before = asyncio.run(_idle(path, process.pid))
            asyncio.run(rounds(path, num_islands, numel, count))
            peak = peak_bytes(process.pid, "VmHWM") - before
        finally:
            process.terminate()
            process.wait(30)
    model = 4 * sum(numel)
    return {"islands": num_islands, "model_bytes": model, "peak_bytes": peak, "models": peak / model}


async def _idle(path: str, pid: int) -> int:
    """Resident memory once the process listens and has nothing."""
    reader, writer = await asyncio.open_unix_connection(path)
    introduction = msgspec.json.encode(Introduction(caller="nobody"))
    writer.writelines((LENGTH.pack(len(introduction)), introduction))
    await writer.drain()
    await asyncio.sleep(3.0)
    writer.close()
    del reader
    return peak_bytes(pid, "VmRSS")


def table() -> str:
    """Memory, and the hub's bytes a second where islands exchange every 30 steps of a second."""
    lines = [
        "| parameters | memory | one exchange of one island, each way | "
        + " | ".join(f"{count} islands" for count in ISLANDS)
        + " |",
        "|---|---|---|" + "---|" * len(ISLANDS),
    ]
    memory = 8 + 4 / FRAGMENTS + (4 + 132 / 256) / FRAGMENTS  # bytes a number, one fragment being merged at a time
    for name, numel in SIZES:
        exchange = encoded_bytes("int4", numel)
        rates = [8 * count * exchange / (INNER_STEPS * STEP_S) for count in ISLANDS]
        lines.append(
            f"| {name} | {format_bytes(round(memory * numel))} | {format_bytes(exchange)} | "
            + " | ".join(f"{_bits(rate)}" for rate in rates)
            + " |"
        )
    return "\n".join(lines)


def _bits(rate: float) -> str:
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate / 1e3:.3g} kbit/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table; nothing is measured")
    parser.add_argument("--write", action="store_true", help="with --table: put it into docs/scale.md")
    parser.add_argument("--numel", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        if arguments.write:
            path = DOCS / "scale.md"
            before, rest = path.read_text().split("<!-- scripts/bench islands_scale --table --write -->\n", 1)
            after = rest.split("<!-- end -->", 1)[1]
            mark = "<!-- scripts/bench islands_scale --table --write -->\n"
            path.write_text(f"{before}{mark}{table()}\n<!-- end -->{after}")
        print(table())
        return
    for num_islands in (2, 8):
        row = measured(num_islands, arguments.numel, arguments.rounds)
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            peak, model = format_bytes(int(row["peak_bytes"])), format_bytes(int(row["model_bytes"]))
            print(f"{num_islands} islands: {peak}, {row['models']:.2f} times the model's {model}", flush=True)


if __name__ == "__main__":
    main()
