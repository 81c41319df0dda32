"""Peers that can stand beside ragtag, where they are installed.

The one idea: each is driven by its own documented loop on the same paced model, and nothing but forward, backward, the
inner optimizer's step and forgetting gradients is paced: what a peer waits for around them is its own. Where a peer
would go on after a failure without saying so, its loop checks that it did not.
"""

import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ragtag.emulate.pace import Pace

MicroBatch = tuple[Any, int]
"""A batch, and how many samples it has."""

_PATIENCE_S = 60
_MATCHMAKING_S = 2
"""What Hivemind gives its peers to find each other; its default of 15 s is for the internet."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One rank's model, and what a peer is told about it."""

    model: torch.nn.Module
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    pace: Pace
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    """A mean over a batch."""
    micro_batches: tuple[int, ...]
    """Samples of each, in one step of this rank."""
    batch: int
    """Samples of one step of all ranks."""
    rank: int
    world_size: int

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return an optimizer whose every step takes what the device would need."""
        optimizer = self.make_optimizer(parameters)
        regions: list[AbstractContextManager[None]] = []

        def begin(*_: object) -> None:
            regions.append(self.pace.optimizer())
            regions[-1].__enter__()

        def end(*_: object) -> None:
            regions.pop().__exit__(None, None, None)

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)
        return optimizer

    def weighted(self, trained: torch.nn.Module, batch: Any, samples: int) -> torch.Tensor:
        """Return the loss, weighted such that summed over micro-batches and averaged over ranks it is the batch's."""
        return self.loss(trained, batch) * (self.world_size * samples / self.batch)


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """How far a peer is that balances itself: an epoch is one batch of all ranks, or more."""

    reached: Callable[[], int]
    complete: Callable[[], int]
    """Those whose gradients are an average over all ranks."""
    reset_timer: Callable[[], object]
    """Keeps time that other ways took out of its measurements of this rank's speed."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A peer that has started."""

    step: Callable[[Sequence[MicroBatch]], None]
    """One step of this rank; or one micro-batch, towards an epoch of all ranks."""
    close: Callable[[], object] = lambda: None
    epochs: Epochs | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One peer: the module that must be importable, and its loop."""

    module: str
    start: Callable[[Replica], Running]
    balances: bool = False
    """It decides who does how much, so there is one way to run it instead of equal batches and a split by hand."""

    def why_not(self) -> str:
        """Why it is skipped here and what to type, or an empty string."""
        if importlib.util.find_spec(self.module) is not None:
            return ""
        return (
            f"{self.module} is not installed; peers go into an environment of their own: python3 -m venv .venv-peers "
            "&& .venv-peers/bin/pip install -e '.[peers]', then .venv-peers/bin/python benchmarks/eta.py instead of "
            "scripts/bench eta"
        )


def _ddp_like(
    replica: Replica, model: DistributedDataParallel, backward: Callable[[torch.Tensor], object]
) -> Callable[[Sequence[MicroBatch]], None]:
    """Return what a step of a wrapped DDP does before its optimizer: gradients are reduced in the last micro-batch."""

    def gradients(micro_batches: Sequence[MicroBatch]) -> None:
        for index, (batch, samples) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else model.no_sync(), replica.pace.forward_backward(samples):
                backward(replica.weighted(model, batch, samples))

    return gradients


def _accelerate(replica: Replica) -> Running:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(replica.model, replica.optimizer(replica.model.parameters()))
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError(f"accelerate sees one process instead of {replica.world_size}: it did not wrap the model")
    gradients = _ddp_like(replica, model, accelerator.backward)

    def step(micro_batches: Sequence[MicroBatch]) -> None:
        gradients(micro_batches)
        optimizer.step()
        with replica.pace.fixed():
            optimizer.zero_grad()

    return Running(step=step)


def _deepspeed(replica: Replica) -> Running:
    """ZeRO stage 1. In cases with a paced optimizer it is charged the whole update on every rank, not its shard's."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # pyright: ignore[reportMissingImports]

    # For inference only, and compiled at the first start, where being stopped leaves a lock that hangs later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accumulated = len(replica.micro_batches)
    settings = {
        "train_micro_batch_size_per_gpu": replica.micro_batches[0],
        "gradient_accumulation_steps": accumulated,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default it clips
    }
    engine, *_ = deepspeed.initialize(
        model=replica.model, optimizer=replica.optimizer(replica.model.parameters()), config=settings
    )

    def step(micro_batches: Sequence[MicroBatch]) -> None:
        for batch, samples in micro_batches:
            with replica.pace.forward_backward(samples):
                # It divides by the number of micro-batches.
                engine.backward(replica.weighted(engine, batch, samples) * accumulated)
            engine.step()
        with replica.pace.fixed():
            engine.zero_grad()

    return Running(step=step)


def _torchft(replica: Replica) -> Running:
    """One replica group a rank, as on machines that may come and go; the lighthouse is rank 0's."""
    os.environ.setdefault("RUST_LOG", "warn")
    import torchft  # pyright: ignore[reportMissingImports]
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    lighthouse = None
    address = [""]
    if replica.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{_LOOPBACK}:0",
            min_replicas=replica.world_size,
            join_timeout_ms=1000 * _PATIENCE_S,
            quorum_tick_ms=20,
        )
        address = [lighthouse.address().replace(socket.gethostname(), _LOOPBACK)]
    dist.broadcast_object_list(address, src=0)
    store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ends_with_manager = [store]  # its server is gone with the last reference
    patience = timedelta(seconds=_PATIENCE_S)
    inner = replica.optimizer(replica.model.parameters())

    def load_state_dict(state: dict[str, Any]) -> None:
        replica.model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(patience),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": replica.model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=replica.world_size,
        replica_id=f"rank{replica.rank}_",
        store_addr=_LOOPBACK,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address[0],
        hostname=_LOOPBACK,
        init_sync=False,
        timeout=patience,
    )
    model = torchft.DistributedDataParallel(manager, replica.model)
    optimizer = torchft.Optimizer(manager, inner)
    gradients = _ddp_like(replica, model, torch.Tensor.backward)
    steps = 0

    def step(micro_batches: Sequence[MicroBatch]) -> None:
        nonlocal steps
        with replica.pace.fixed():
            optimizer.zero_grad()
        gradients(micro_batches)
        optimizer.step()
        steps += 1
        if manager.current_step() != steps:
            raise RuntimeError(f"torchft discarded step {steps} on rank {replica.rank}: {manager.errored()}")

    def close() -> None:
        manager.shutdown(wait=False)
        ends_with_manager.clear()
        if lighthouse is not None:
            lighthouse.shutdown()

    return Running(step=step, close=close)


class _CompleteRounds(logging.Handler):
    """Counts the rounds in which Hivemind averaged over all ranks: it goes on with fewer, or with one, by itself."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._complete = f"Averaged gradients with {world_size} peers"
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one message."""
        self.count += record.getMessage() == self._complete


def _hivemind(replica: Replica) -> Running:
    import hivemind  # pyright: ignore[reportMissingImports]

    settings: dict[str, Any] = {"host_maddrs": [f"/ip4/{_LOOPBACK}/tcp/0"], "start": True}
    settings |= {"use_relay": False, "use_auto_relay": False, "use_ipfs": False}
    address = [""]
    if replica.rank == 0:
        table = hivemind.DHT(**settings)
        address = [str(table.get_visible_maddrs()[0])]
    dist.broadcast_object_list(address, src=0)
    if replica.rank > 0:
        table = hivemind.DHT(initial_peers=address, **settings)
    optimizer = hivemind.Optimizer(
        dht=table,  # pyright: ignore[reportPossiblyUnboundVariable]
        run_id="eta",
        target_batch_size=replica.batch,
        batch_size_per_step=replica.micro_batches[0],
        params=list(replica.model.parameters()),
        optimizer=replica.optimizer,
        matchmaking_time=_MATCHMAKING_S,
        averaging_timeout=_PATIENCE_S / 3,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
        verbose=True,
    )
    rounds = _CompleteRounds(replica.world_size)
    logging.getLogger("hivemind.optim.optimizer").addHandler(rounds)

    def step(micro_batches: Sequence[MicroBatch]) -> None:
        ((batch, samples),) = micro_batches
        with replica.pace.forward_backward(samples):
            replica.loss(replica.model, batch).backward()
        optimizer.step()
        with replica.pace.fixed():
            optimizer.zero_grad()

    def close() -> None:
        optimizer.shutdown()
        table.shutdown()  # pyright: ignore[reportPossiblyUnboundVariable]

    epochs = Epochs(
        reached=lambda: optimizer.local_epoch,
        complete=lambda: rounds.count,
        reset_timer=optimizer.tracker.performance_ema.reset_timer,
    )
    return Running(step=step, close=close, epochs=epochs)


PEERS = {
    "accelerate": Peer(module="accelerate", start=_accelerate),
    "deepspeed": Peer(module="deepspeed", start=_deepspeed),
    "hivemind": Peer(module="hivemind", start=_hivemind, balances=True),
    "torchft": Peer(module="torchft", start=_torchft),
}
