"""Ways to train on the emulated devices: alone, stock DDP, peers by their own API, and ragtag.

The one idea: every way has its own model, optimizer and pace, and runs the same numbered steps, hence under the same
random slowdowns.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import ragtag
from ragtag.emulate.environment import from_environment
from ragtag.emulate.pace import Pace
from ragtag.emulate.solo import plain_step
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn

from .cases import Case
from .peers import PEERS

Step = Callable[[int], Any]


class Way:
    """One way to train. `step(number)` runs a step of `samples` samples over all ranks."""

    def __init__(self, samples: int, pace: Pace, step: Step, close: Callable[[], object] = lambda: None) -> None:
        self.samples, self.pace, self.close = samples, pace, close
        self._step = step

    def step(self, number: int) -> float:
        """Run one step and return its seconds."""
        self.pace.step(number)
        started_s = time.perf_counter()
        self._step(number)
        return time.perf_counter() - started_s

    def run(self, steps: int, first: int) -> list[float]:
        """Run some steps and return the seconds of each."""
        return [self.step(number) for number in range(first, first + steps)]


def fresh(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Pace]:
    """The same model and optimizer on every rank, paced like its device."""
    torch.manual_seed(0)
    emulator = from_environment(os.environ, rank)
    assert emulator is not None
    model = ByteGPT()
    emulator.pace.attach(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), emulator.pace


def plain_way(case: Case, dataset: StandardLibrary, rank: int, *, wrapped: str, equal: bool = False) -> Way:
    """Alone (`wrapped` empty), DDP ("ddp"), or a peer of `peers.py`, with equal shares or those set by hand."""
    world_size = len(case.speeds)
    share = -(-case.batch // world_size) if equal else case.by_hand[rank]
    samples = share * world_size if equal else case.batch
    size = case.micro_batch or share
    counts = [min(size, share - done) for done in range(0, share, size)]
    weight = world_size * share / samples if wrapped else 1.0
    model, optimizer, pace = fresh(rank)
    trained: Any = DistributedDataParallel(model) if wrapped == "ddp" else model

    def micro_batches(number: int) -> Iterator[tuple[Any, int]]:
        start = (number * 997 + rank * 131) % (len(dataset) - share)
        for index, count in enumerate(counts):
            trained.require_backward_grad_sync = index == len(counts) - 1  # DDP's own switch
            yield default_collate([dataset[start + i] for i in range(count)]), count

    if wrapped in PEERS:
        step = PEERS[wrapped].build(model, optimizer, pace, loss_fn, weight, share)

        def one(number: int) -> None:
            ((batch, count),) = micro_batches(number)
            step(batch, count)

        return Way(samples, pace, one)
    return Way(
        samples,
        pace,
        plain_step(pace, trained, optimizer, lambda m, b: loss_fn(m, b) * weight / len(counts), micro_batches),
    )


class RagtagWay(Way):
    """ragtag as a user would start it, with shares of its own choice."""

    def __init__(
        self,
        case: Case,
        dataset: StandardLibrary,
        *,
        pull: bool | None = None,
        shares: tuple[int, ...] | None = None,
    ) -> None:
        torch.manual_seed(0)
        model = ByteGPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = ragtag.Config(pull=pull, micro_batch=case.micro_batch)
        self.trainer = ragtag.Trainer(
            model, optimizer, loss_fn, dataset, global_batch_size=case.batch, shares=shares, config=config
        )
        self.reports: list[ragtag.StepReport] = []
        super().__init__(
            case.batch, self.trainer._run.pace, self._one, self.trainer.close
        )  # its own steps announce themselves

    def _one(self, number: int) -> None:
        self.reports += self.trainer.steps(1)


def together(way: Way, steps: int, first: int) -> float:
    """Samples a second of all ranks together over some steps."""
    dist.barrier()
    started_s = time.perf_counter()
    way.run(steps, first)
    dist.barrier()
    return way.samples * steps / (time.perf_counter() - started_s)


def summed_alone(way: Way, share: int, steps: int, first: int) -> float:
    """Sum over ranks of what each does alone, in samples a second; nobody communicates meanwhile."""
    dist.barrier()
    seconds = sum(way.run(steps, first))
    total = torch.tensor([share * steps / seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
