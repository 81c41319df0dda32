"""The largest model that trains on devices of unequal memory: slices by free memory against FSDP2's equal shards.

    scripts/bench zero_memory [--unit 4MB] [--width 96] [--layout auto] [--depth 40,80] [--json]

Four processes with the memory of devices of 24, 24, 12 and 6 units; a GPT of many equal blocks, AdamW in fp32, one
sample of 16 bytes at a time, activations recomputed per block. By bisection over its depth: the deepest one that makes
three steps within every cap. Summed memory allows sum(caps) / 16 bytes of state per parameter.

What is counted is every block that torch's CPU allocator has handed out and not got back (`live_bytes.c`, preloaded;
needs a C compiler), on all threads: parameters, gradients, optimizer state, activations, temporaries of operators,
copies on their way. Not counted: Python, sockets' own buffers, and what lived before the model was made. Peaks are
those of the steps; while the trainer is made, each process has the whole model in (host) memory, with either framework.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ragtag
from ragtag.control.layout import peak_bytes
from ragtag.core.quantities import format_bytes, parse_bytes
from ragtag.emulate.memory import MemoryCap
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn
from ragtag.runtime.zero.choosing import needs_of

UNITS = (24, 24, 12, 6)
STATE_BYTES = 16
"""A parameter's: itself, its gradient and AdamW's two moments, in fp32."""
CONTEXT, STEPS = 16, 3
COUNTER = Path(__file__).with_name("live_bytes.c")


class DeepGPT(ByteGPT):
    """Keeps each block's input and computes the block again in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, context) bytes to (batch, context, 256) logits."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def deep_gpt(depth: int, width: int) -> DeepGPT:
    torch.manual_seed(0)
    return DeepGPT(width=width, num_layers=depth, num_heads=4, context=CONTEXT)


def num_parameters(depth: int, width: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in deep_gpt(depth, width).parameters())


class Counter:
    """The preloaded counter, from here on."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.live_bytes.restype = self._library.peak_live_bytes.restype = ctypes.c_longlong
        self._before = self._library.live_bytes()
        self.forget_peak()

    def forget_peak(self) -> None:
        self._library.forget_peak()

    @property
    def live(self) -> int:
        return self._library.live_bytes() - self._before

    @property
    def peak(self) -> int:
        return self._library.peak_live_bytes() - self._before


def train_ragtag(arguments: argparse.Namespace, dataset: StandardLibrary, counter: Counter) -> dict[str, object]:
    model = deep_gpt(arguments.depth, arguments.width)
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn,
        dataset,
        global_batch_size=len(UNITS),
        shares=(1,) * len(UNITS),
        config=ragtag.Config(layout=arguments.layout, micro_batch=1),
    )
    run, plan = trainer._run, trainer.plan
    built, resident = counter.peak, counter.live
    counter.forget_peak()
    losses = [report.loss for report in trainer.steps(STEPS)]
    row = {
        "layout": plan.layout,
        "peak": counter.peak,
        "built": built,
        "resident": resident,
        "emulated": run.memory.peak_bytes if isinstance(run.memory, MemoryCap) else None,
        "losses": losses,
    }
    if plan.layout != "replicated":
        row["planned"] = peak_bytes(needs_of(model, run.optimizer), plan.layout, plan.slices)[trainer.rank]
    trainer.close()
    return row


def train_fsdp2(arguments: argparse.Namespace, dataset: StandardLibrary, counter: Counter) -> dict[str, object]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}/store", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    model = deep_gpt(arguments.depth, arguments.width)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    built, resident = counter.peak, counter.live
    counter.forget_peak()
    losses = []
    for step in range(STEPS):
        tokens, targets = dataset[step * world_size + rank]
        loss = loss_fn(model, (tokens[None], targets[None]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    row = {"peak": counter.peak, "built": built, "resident": resident, "losses": losses}
    dist.barrier()
    dist.destroy_process_group()
    return row


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dataset = StandardLibrary(context=CONTEXT, max_files=2)
    counter = Counter()
    train = {"ragtag": train_ragtag, "fsdp2": train_fsdp2}[arguments.way]
    row = train(arguments, dataset, counter)
    Path(arguments.meeting, f"rank{os.environ['RANK']}.json").write_text(json.dumps(row))


def trial(way: str, depth: int, arguments: argparse.Namespace, caps: list[int]) -> list[dict] | None:
    """What the ranks say of a model of `depth` blocks, by rank; None where it ran out of memory."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "live_bytes.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", library, COUNTER], check=True)
        command = [sys.executable, "-m", "ragtag.cli.main", "launch", "--fixed", "--no-page"]
        if way == "ragtag":
            cluster = Path(directory, "devices.toml")
            cluster.write_text(
                "".join(f'[[device]]\nname = "device{rank}"\nmemory = "{cap} B"\n' for rank, cap in enumerate(caps))
            )
            command += ["--emulate", str(cluster)]
        else:
            command += ["--local", str(len(caps))]
        command += [__file__, "--way", way, "--depth", str(depth), "--width", str(arguments.width)]
        command += ["--layout", arguments.layout, "--meeting", directory]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        rows = [Path(directory, f"rank{rank}.json") for rank in range(len(caps))]
        if done.returncode == 0:
            return [json.loads(row.read_text()) for row in rows]
        if "out of memory" in done.stderr.lower() or "fits under no layout" in done.stderr:
            return None
        raise SystemExit(done.stderr)


def fits(rows: list[dict] | None, caps: list[int]) -> bool:
    return rows is not None and all(row["peak"] <= cap for row, cap in zip(rows, caps))


def deepest(way: str, arguments: argparse.Namespace, caps: list[int], high: int) -> tuple[int, list[dict]]:
    """The deepest model that fits, below `high`."""
    low, best = 0, None
    guess = int(high * (0.85 if way == "ragtag" else 0.3))
    while high - low > 1:
        depth = min(max(guess, low + 1), high - 1)
        rows = trial(way, depth, arguments, caps)
        if fits(rows, caps):
            low, best = depth, rows
        else:
            high = depth
        print(f"  {way}: {depth} blocks {'fit' if low == depth else 'do not fit'}", file=sys.stderr, flush=True)
        if rows is None:
            guess = (low + high) // 2
        else:  # a peak grows with the depth, nearly in proportion
            guess = int(depth * min(cap / row["peak"] for row, cap in zip(rows, caps)))
    assert best is not None, f"{way}: not even one block fits"
    return low, best


def described(way: str, depth: int, rows: list[dict], width: int, caps: list[int]) -> dict[str, object]:
    count = num_parameters(depth, width)
    return {
        "way": way,
        "depth": depth,
        "parameters": count,
        "of_summed_memory": round(STATE_BYTES * count / sum(caps), 4),
        "ranks": [{"cap": cap, "of_cap": round(row["peak"] / cap, 3), **row} for row, cap in zip(rows, caps)],
    }


def show(result: dict, caps: list[int]) -> None:
    print(
        f"{result['way']}: {result['depth']} blocks, {result['parameters'] / 1e6:.2f} M parameters, "
        f"{100 * result['of_summed_memory']:.1f} % of what {format_bytes(sum(caps))} hold"
    )
    for rank, row in enumerate(result["ranks"]):
        extra = ""
        if "planned" in row:
            extra = (
                f", planned {row['planned'] / 1e6:.2f} ({100 * (row['peak'] / row['planned'] - 1):+.1f} %), emulator "
                f"counts {row['emulated'] / 1e6:.2f}"
            )
        print(
            f"  rank {rank}: peak {row['peak'] / 1e6:.2f} of {row['cap'] / 1e6:.2f} MB ({100 * row['of_cap']:.0f} %)"
            f"{extra}; before the first step {row['resident'] / 1e6:.2f}, while it is made {row['built'] / 1e6:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", default="4MB", help="caps are 24, 24, 12 and 6 of it")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layout", default="auto", choices=["auto", "zero1", "zero2", "zero3"])
    parser.add_argument("--way", choices=["ragtag", "fsdp2"], help="only this one")
    parser.add_argument("--depth", help="only these depths, whether they fit or not")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meeting:
        arguments.depth = int(arguments.depth)
        worker(arguments)
        return
    caps = [units * parse_bytes(arguments.unit) for units in UNITS]
    per_block = num_parameters(2, arguments.width) - num_parameters(1, arguments.width)
    high = 1 + (sum(caps) // STATE_BYTES - num_parameters(1, arguments.width)) // per_block + 1
    results = []
    for way in [arguments.way] if arguments.way else ["ragtag", "fsdp2"]:
        if arguments.depth:
            for depth in map(int, arguments.depth.split(",")):
                rows = trial(way, depth, arguments, caps)
                if rows is None:
                    print(f"{way}: {depth} blocks run out of memory")
                else:
                    results.append(described(way, depth, rows, arguments.width, caps))
        else:
            results.append(described(way, *deepest(way, arguments, caps, high), arguments.width, caps))
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            show(result, caps)


if __name__ == "__main__":
    main()
