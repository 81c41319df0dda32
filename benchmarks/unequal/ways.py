"""Ways to train on the emulated devices: alone, stock DDP, peers by their own API, and ragtag.

The one idea: every way has its own model, optimizer and pace, and runs the same numbered steps, hence under the same
random slowdowns. A peer that balances itself has no shares; its samples are counted as they are done.
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
from .peers import Epochs, MicroBatch, Peer, Replica, Running

Step = Callable[[int], Any]

EPOCH_LIMIT_S = 60
"""What an epoch of a peer that balances itself may take."""
SETTLING_EPOCHS = 12


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

    def settle(self, number: int) -> None:
        """Get ready for a block that is measured and begins with step `number`."""

    def processed(self, steps: int) -> int:
        """Samples of all ranks in the block that has just ended."""
        return self.samples * steps


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every way."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def fresh(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Pace]:
    """The same model and optimizer on every rank, paced like its device."""
    torch.manual_seed(0)
    emulator = from_environment(os.environ, rank)
    assert emulator is not None
    model = ByteGPT()
    emulator.pace.attach(model)
    return model, adamw(model.parameters()), emulator.pace


def split(case: Case, rank: int, *, equal: bool) -> tuple[list[int], int]:
    """Samples of each micro-batch of this rank, and of all ranks together."""
    world_size = len(case.speeds)
    share = -(-case.batch // world_size) if equal else case.by_hand[rank]
    size = case.micro_batch or share
    counts = [min(size, share - done) for done in range(0, share, size)]
    return counts, share * world_size if equal else case.batch


def drawn(dataset: StandardLibrary, count: int, number: int, rank: int) -> Any:
    """A batch of `count` samples, another one for each number and rank."""
    start = (number * 997 + rank * 131) % (len(dataset) - count)
    return default_collate([dataset[start + i] for i in range(count)])


def plain_way(case: Case, dataset: StandardLibrary, rank: int, *, wrapped: str, equal: bool = False) -> Way:
    """Alone (`wrapped` empty) or DDP ("ddp"), with equal shares or those set by hand."""
    counts, samples = split(case, rank, equal=equal)
    weight = len(case.speeds) * sum(counts) / samples if wrapped else 1.0
    model, optimizer, pace = fresh(rank)
    trained: Any = DistributedDataParallel(model) if wrapped == "ddp" else model

    def micro_batches(number: int) -> Iterator[MicroBatch]:
        for index, count in enumerate(counts):
            trained.require_backward_grad_sync = index == len(counts) - 1  # DDP's own switch
            yield drawn(dataset, count, number, rank), count

    return Way(
        samples,
        pace,
        plain_step(pace, trained, optimizer, lambda m, b: loss_fn(m, b) * weight / len(counts), micro_batches),
    )


def peer_ways(name: str, peer: Peer, case: Case, dataset: StandardLibrary, rank: int) -> dict[str, Way]:
    """The ways to run a peer, by name: with equal batches and split by hand, or the one way where it balances itself.

    Raises:
        Exception: whatever the peer raises when it cannot start here.
    """
    if peer.balances:
        # What the slowest device would be given, or a micro-batch of all ways: the others do more of them.
        size = case.micro_batch or min(case.by_hand)
        running, replica = started(peer, case, rank, [size], case.batch)
        return {name: BalancingWay(running, replica, lambda number: (drawn(dataset, size, number, rank), size))}
    ways: dict[str, Way] = {}
    for suffix in ("equal", "by_hand"):
        counts, samples = split(case, rank, equal=suffix == "equal")
        running, replica = started(peer, case, rank, counts, samples)
        ways[f"{name}_{suffix}"] = SharedWay(
            running,
            replica,
            lambda number, counts=counts: [(drawn(dataset, count, number, rank), count) for count in counts],
        )
    return ways


def started(peer: Peer, case: Case, rank: int, counts: list[int], samples: int) -> tuple[Running, Replica]:
    """Start a peer on a model of its own."""
    model, _, pace = fresh(rank)
    replica = Replica(
        model=model,
        make_optimizer=adamw,
        pace=pace,
        loss=loss_fn,
        micro_batches=tuple(counts),
        batch=samples,
        rank=rank,
        world_size=len(case.speeds),
    )
    return peer.start(replica), replica


class SharedWay(Way):
    """A peer whose ranks do fixed shares."""

    def __init__(self, running: Running, replica: Replica, micro_batches: Callable[[int], list[MicroBatch]]) -> None:
        super().__init__(replica.batch, replica.pace, lambda number: running.step(micro_batches(number)), running.close)
        self._replica = replica

    def check(self) -> None:
        """Raise RuntimeError unless all ranks have the same parameters: a peer that never averaged would be fast."""
        own = torch.cat([parameter.detach().flatten() for parameter in self._replica.model.parameters()])
        first = own.clone()
        dist.broadcast(first, 0)
        difference = float((own - first).abs().max())
        if difference > 1e-6:
            raise RuntimeError(f"rank {self._replica.rank} has other parameters than rank 0, by up to {difference:.1g}")


class BalancingWay(Way):
    """A peer that decides who does how much. A step is an epoch: a batch of all ranks, or more."""

    def __init__(self, running: Running, replica: Replica, micro_batch: Callable[[int], MicroBatch]) -> None:
        super().__init__(replica.batch, replica.pace, self._epoch, running.close)
        assert running.epochs is not None
        self._epochs: Epochs = running.epochs
        self._running, self._replica, self._micro_batch = running, replica, micro_batch
        self._target = self._drawn = self._block_began = 0
        self.measured_epochs = self.complete_epochs = 0

    def settle(self, number: int) -> None:
        """Run epochs until one averages over all ranks; the time between blocks misleads the first ones.

        Raises:
            RuntimeError: none did.
        """
        for _ in range(SETTLING_EPOCHS):
            before = self._epochs.complete()
            self._target = max(agreed(self._epochs.reached(), dist.ReduceOp.MAX), self._target)
            self.step(number)
            if agreed(self._epochs.complete() - before, dist.ReduceOp.MIN):
                break
        else:
            raise RuntimeError(f"none of {SETTLING_EPOCHS} epochs averaged the gradients of all ranks")
        self._target = agreed(self._epochs.reached(), dist.ReduceOp.MAX)
        self._block_began = self._drawn

    def run(self, steps: int, first: int) -> list[float]:
        """Run some epochs and return the seconds of each."""
        before = self._epochs.complete()
        seconds = super().run(steps, first)
        self.measured_epochs += steps
        self.complete_epochs += min(steps, self._epochs.complete() - before)
        return seconds

    def processed(self, steps: int) -> int:
        """Samples of all ranks in the block that has just ended."""
        size = self._replica.micro_batches[0]
        return agreed((self._drawn - self._block_began) * size, dist.ReduceOp.SUM)

    def _epoch(self, number: int) -> None:
        self._target += 1
        self._epochs.reset_timer()
        deadline_s = time.perf_counter() + EPOCH_LIMIT_S
        while self._epochs.reached() < self._target:
            if time.perf_counter() > deadline_s:
                raise RuntimeError(
                    f"rank {self._replica.rank} is at epoch {self._epochs.reached()} after {EPOCH_LIMIT_S} s, "
                    f"expected {self._target}"
                )
            self._running.step([self._micro_batch(self._drawn)])
            self._drawn += 1


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


def agreed(value: int, how: Any) -> int:
    """One number of all ranks: their sum, least or greatest."""
    total = torch.tensor([value])
    dist.all_reduce(total, op=how)
    return int(total)


def together(way: Way, steps: int, first: int) -> float:
    """Samples a second of all ranks together over some steps."""
    way.settle(first)
    dist.barrier()
    started_s = time.perf_counter()
    way.run(steps, first)
    dist.barrier()
    seconds = time.perf_counter() - started_s
    return way.processed(steps) / seconds


def summed_alone(way: Way, share: int, steps: int, first: int) -> float:
    """Sum over ranks of what each does alone, in samples a second; nobody communicates meanwhile."""
    dist.barrier()
    seconds = sum(way.run(steps, first))
    total = torch.tensor([share * steps / seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
