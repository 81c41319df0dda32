"""Evaluate a dataset on all ranks, with the value one process would give.

The dataset is cut into the same runs whatever the number of ranks; each run's sums go to their own place in one
vector, and everybody adds that vector up in the same order. So the value does not depend on who computed what, to the
last bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from ragtag.comm.group import Group, raise_failure
from ragtag.control.sharing import units_per_rank
from ragtag.core.errors import LossError
from ragtag.core.ledger import Ledger
from ragtag.core.mixing import seed_for
from ragtag.core.values import Plan
from ragtag.emulate.memory import MemoryLimit
from ragtag.emulate.pace import Pace
from ragtag.runtime.batches import to_device
from ragtag.runtime.device import copies_asynchronously
from ragtag.runtime.evaluation_pieces import EvaluationPieces, Piece
from ragtag.runtime.loader import UnitLoader
from ragtag.runtime.loss import as_metric, number_of
from ragtag.runtime.modes import mode
from ragtag.runtime.out_of_memory import release_memory
from ragtag.runtime.pipe.evaluating import forwards
from ragtag.runtime.pipe.pipe import Pipe
from ragtag.runtime.precision import autocast
from ragtag.runtime.randomness import preserved_random_state, seed_everything
from ragtag.runtime.zero.rounds import Rounds


class Evaluation(float):
    """The weighted mean of `metric_fn` over a dataset: a float, with what went into it."""

    metrics: dict[str, float]
    """Further means, from `ragtag.Loss(..., metrics=...)`."""
    samples: int
    weight: float

    def __new__(cls, value: float, *, metrics: dict[str, float], samples: int, weight: float) -> "Evaluation":
        """Make one from its parts."""
        self = super().__new__(cls, value)
        self.metrics = metrics
        self.samples = samples
        self.weight = weight
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        """What `copy` and `pickle` make another one from."""
        return (float(self),), {"metrics": self.metrics, "samples": self.samples, "weight": self.weight}

    def to_state(self) -> dict[str, Any]:
        """A plain record for checkpoints."""
        return {"value": float(self), "metrics": self.metrics, "samples": self.samples, "weight": self.weight}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Evaluation":
        """Back from `to_state`."""
        return cls(state["value"], metrics=state["metrics"], samples=state["samples"], weight=state["weight"])


class _Run(msgspec.Struct, frozen=True):
    unit: int
    total: float
    count: float
    metrics: dict[str, float]


def evaluate(
    model: torch.nn.Module,
    metric_fn: Any,
    loader: UnitLoader,
    *,
    dataset_size: int,
    run_size: int,
    plan: Plan,
    group: Group,
    device: torch.device,
    pace: Pace,
    precision: str,
    seed: int,
    name: str,
    memory: MemoryLimit,
    pieces: EvaluationPieces,
    rounds: Rounds | None = None,
    pipe: Pipe | None = None,
) -> Evaluation:
    """Mean of `metric_fn` over the whole dataset, in evaluation mode, without gradients; equal on every rank.

    Args:
        run_size: samples in one forward; depends on settings only, never on the cluster.
        seed: random numbers drawn in a run are seeded by (seed, run), and the script's own are left alone.
        name: distinguishes this evaluation from every other one of the run.
        memory: what a forward may hold.
        pieces: how much this rank's memory was found to hold.
        rounds: what makes parameters whole for a forward, on all ranks at once; None: they are.
        pipe: this rank's place in a pipeline; None: it computes the whole model.

    Raises:
        DeviceMemoryError: not even one sample fits into it.
    """
    ledger = Ledger(step=0, samples=dataset_size, unit=run_size, units_per_rank=_units(plan, dataset_size, run_size))
    mine = list(ledger.todo(group.rank if pipe is None else pipe.feeding_rank))
    loader.keep(())  # what an evaluation that failed had asked for
    runs: list[_Run] = []
    ahead = 0

    def whole_for(call: Callable[[], Any]) -> Any:
        return call() if rounds is None else rounds.forward_only(call)

    def request(piece: Piece) -> None:
        loader.request((0, piece[0]), 0, tuple(range(*piece)))

    def forward(unit: int, piece: Piece, whole_for: Callable[[Callable[[], Any]], Any] = whole_for) -> None:
        start, stop = piece
        request(piece)
        data = loader.take([(0, start)])
        with preserved_random_state(device):
            part = () if start == ledger.span(unit)[0] else (start,)
            seed_everything(seed_for(seed, 0, unit, *part), device)
            with memory.evaluation():
                batch = to_device(data, device, non_blocking=copies_asynchronously(device))
                paced = pace.forward_backward(stop - start)
                if pipe is not None:
                    paced = pace.part(stop - start, pipe.forward_part, micro_batch=0)
                with paced:
                    result = whole_for(lambda: metric_fn(model, batch))
                if pipe is not None and not pipe.is_last:
                    return
                loss = as_metric(result, num_samples=stop - start)
                total, count = number_of(loss.total), number_of(loss.count)
        metrics = {key: number_of(value) for key, value in loss.metrics.items()}
        runs.append(_Run(unit, total, count, metrics))

    where = f"rank {group.rank} ({group.hosts[group.rank]}), {device},"
    with mode(model, training=False), torch.no_grad(), autocast(precision, device):
        if pipe is not None:
            most = max(len(ledger.todo(rank)) for rank in range(group.world_size))
            forwards(pipe, mine, most, lambda unit, call: forward(unit, ledger.span(unit), call), device)
        for position, unit in enumerate(mine if pipe is None else ()):
            if group.elastic:
                raise_failure(group)
            while ahead < min(len(mine), position + 4):
                for piece in pieces.of(ledger.span(mine[ahead])):
                    request(piece)
                ahead += 1
            if rounds is not None:  # others count on as many forwards as there are runs
                forward(unit, ledger.span(unit))
                continue
            pieces.compute(
                ledger.span(unit),
                partial(forward, unit),
                forget=partial(loader.keep, ()),
                where=where,
                release=partial(release_memory, device),
            )
            group.note(group.step, f"evaluating, {position + 1} of {len(mine)} runs done")
        if rounds is not None:
            for _ in range(max(len(ledger.todo(rank)) for rank in range(group.world_size)) - len(mine)):
                rounds.forward_only(None)
    names = _metric_names(group, runs, name)
    table = torch.zeros(ledger.num_units, 2 + len(names), dtype=torch.float64)
    for run in runs:
        table[run.unit] += torch.tensor(
            [run.total, run.count, *(run.metrics[key] for key in names)], dtype=torch.float64
        )
    flat = table.view(-1)
    group.wait(group.all_reduce(flat), "evaluating")
    total, weight, *sums = (sum(column) for column in zip(*table.tolist()))
    mean = total / weight if weight else float("nan")
    metrics = {key: value / weight if weight else float("nan") for key, value in zip(names, sums)}
    return Evaluation(mean, metrics=metrics, samples=dataset_size, weight=weight)


def _units(plan: Plan, dataset_size: int, run_size: int) -> tuple[int, ...]:
    return units_per_rank(msgspec.structs.replace(plan, unit=run_size), dataset_size)


def _metric_names(group: Group, runs: list[_Run], name: str) -> list[str]:
    own = sorted({key for run in runs for key in run.metrics})
    for run in runs:
        if sorted(run.metrics) != own:
            raise LossError(f"metric_fn returned metrics {sorted(run.metrics)} for one batch and {own} over all.")
    everybody = group.gather(f"metric names of {name}", own)
    union = sorted({key for names in everybody for key in names})
    if runs and own != union:
        raise LossError(f"metric_fn returned metrics {own} on rank {group.rank} and {union} over all ranks.")
    return union
