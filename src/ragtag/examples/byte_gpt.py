"""A byte-level GPT on real text: Python's own standard library, which is on every machine that has Python.

    python -m ragtag.examples.byte_gpt                                  # one process
    ragtag launch --local 3 -m ragtag.examples.byte_gpt                 # three workers, equal shares
    ragtag launch --local 3 --shares 8,5,3 -m ragtag.examples.byte_gpt  # three workers, unequal shares
    torchrun --nproc-per-node=3 -m ragtag.examples.byte_gpt             # under torchrun

All of them train the same model on the same samples to the same loss.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import ragtag

REPORTED = ("loss", "wall_s", "shares", "compute_s", "wait_s", "comm_s")
"""What `--json` prints of a step's report, besides its number."""


class Block(nn.Module):
    """Pre-norm transformer block (Radford et al. 2019)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, context, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.narrow(functional.gelu(self.widen(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """Predicts the next byte; 1.4 M parameters at the default size."""

    def __init__(self, *, width: int = 192, num_layers: int = 3, num_heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, context) bytes to (batch, context, 256) logits."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class StandardLibrary(torch.utils.data.Dataset):
    """Windows of `context` + 1 bytes over the sources of Python's standard library."""

    def __init__(self, *, context: int = 64, max_files: int = 80) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:max_files]
        text = b"".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next byte, a mean: every sample has equally many bytes."""
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main() -> None:
    """Train, and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint at the end")
    parser.add_argument("--every", type=int, default=10, help="print every so many steps")
    parser.add_argument("--json", action="store_true", help="print lines of JSON instead: steps, then decisions")
    parser.add_argument("--double", action="store_true", help="train in fp64, where rounding cannot hide anything")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = ByteGPT().double() if arguments.double else ByteGPT()
    trainer = ragtag.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=arguments.lr),
        loss_fn,
        StandardLibrary(),
        global_batch_size=arguments.batch,
        clip_norm=1.0,
    )
    started = time.perf_counter()
    for step in trainer.steps(arguments.steps):
        if trainer.rank == 0 and arguments.json:
            row = {name: getattr(step, name) for name in REPORTED}
            print(json.dumps({"step": step.number, **row}), flush=True)
        elif trainer.rank == 0 and step.number % arguments.every == 0:
            speed = step.number * arguments.batch / (time.perf_counter() - started)
            print(
                f"step {step.number:5d}  loss {step.loss:.4f}  {speed:7.1f} samples/s  shares {step.shares}", flush=True
            )
    if trainer.rank == 0 and arguments.json:
        decisions = [
            {
                "step": decision.step,
                "reason": decision.reason,
                "predicted_step_s": decision.predicted_step_s,
                "achieved_step_s": decision.achieved_step_s,
            }
            for decision in trainer.decisions
        ]
        print(json.dumps({"decisions": decisions}), flush=True)
    if arguments.save:
        trainer.save(arguments.save)


if __name__ == "__main__":
    main()
