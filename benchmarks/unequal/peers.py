"""Peers that can stand beside ragtag in the same run, where they are installed.

The one idea: each is driven by its own documented loop on the same paced model. `build` returns a function that runs
one optimizer step on a batch; what is not installed says how to get it.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ragtag.emulate.pace import Pace

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
PeerStep = Callable[[Any, int], None]
Build = Callable[[torch.nn.Module, torch.optim.Optimizer, Pace, Loss, float, int], PeerStep]


@dataclass(frozen=True)
class Peer:
    """One peer: the module that must be importable, and its loop."""

    module: str
    install: str
    build: Build

    def why_not(self) -> str:
        """Why it is skipped here, or an empty string."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed: {self.install}"
        return ""


def _accelerate(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, pace: Pace, loss: Loss, weight: float, share: int
) -> PeerStep:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Any, samples: int) -> None:
        with pace.forward_backward(samples):
            accelerator.backward(loss(prepared, batch) * weight)
        with pace.optimizer():
            prepared_optimizer.step()
        with pace.fixed():
            prepared_optimizer.zero_grad()

    return step


def _deepspeed(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, pace: Pace, loss: Loss, weight: float, share: int
) -> PeerStep:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # pyright: ignore[reportMissingImports]

    settings = {
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(batch: Any, samples: int) -> None:
        with pace.forward_backward(samples):
            engine.backward(loss(engine, batch) * weight)
        with pace.optimizer():
            engine.step()

    return step


PEERS = {
    "accelerate": Peer("accelerate", "pip install accelerate", _accelerate),
    "deepspeed": Peer("deepspeed", "pip install deepspeed ninja", _deepspeed),
}
