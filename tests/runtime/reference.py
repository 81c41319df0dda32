"""The plain training loops that ragtag is held against: no ragtag in them except the sampler's order of samples."""

from collections.abc import Callable, Sequence

import torch
from torch.utils.data import default_collate

from ragtag.core.mixing import seed_for
from ragtag.core.sampler import Sampler
from ragtag.runtime.randomness import seed_everything

SumLoss = Callable[[torch.nn.Module, object], tuple[torch.Tensor, float]]


def plain_run(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sum_loss: SumLoss,
    dataset: Sequence,
    *,
    steps: int,
    batch: int,
    seed: int = 0,
    clip_norm: float | None = None,
    scheduler=None,
    collate=default_collate,
) -> list[dict[str, torch.Tensor]]:
    """One process, one full batch a step: gradient of (sum of losses) / (sum of weights). Returns each step's
    gradients."""
    sampler = Sampler(dataset_size=len(dataset), global_batch_size=batch, seed=seed, shuffle=True)
    history = []
    for step in range(1, steps + 1):
        size = sampler.batch(step).size
        samples = collate([dataset[i] for i in sampler.indices(step, 0, size)])
        optimizer.zero_grad()
        total, weight = sum_loss(model, samples)
        if weight == 0:  # nothing to average over: the step is skipped
            history.append({})
            continue
        (total / weight).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        history.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return history


def plain_unit_run(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sum_loss: SumLoss,
    dataset: Sequence,
    *,
    steps: int,
    batch: int,
    unit: int,
    seed: int = 0,
) -> None:
    """One process that accumulates the units one after the other, BatchNorm statistics merged by count."""
    sampler = Sampler(dataset_size=len(dataset), global_batch_size=batch, seed=seed, shuffle=True)
    for step in range(1, steps + 1):
        size = sampler.batch(step).size
        optimizer.zero_grad()
        start = [b.clone() for b in model.buffers()]
        changes = [torch.zeros_like(b, dtype=torch.float64) for b in start]
        weights = 0.0
        for number, first in enumerate(range(0, size, unit)):
            last = min(first + unit, size)
            samples = default_collate([dataset[i] for i in sampler.indices(step, first, last)])
            for buffer, value in zip(model.buffers(), start):
                buffer.copy_(value)
            seed_everything(seed_for(seed, step, number))
            total, weight = sum_loss(model, samples)
            for change, buffer, value in zip(changes, model.buffers(), start):
                change.add_(buffer.double() - value.double(), alpha=last - first)
            total.backward()
            weights += weight
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weights)
        for buffer, value, change in zip(model.buffers(), start, changes):
            merged = value.double() + change / size
            buffer.copy_(merged if buffer.is_floating_point() else merged.round())
        optimizer.step()


def worst_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Per tensor, norm-relative, floored at 1e-6 of the global norm (promise P1)."""
    assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    if not theirs:
        return 0.0
    floor = 1e-6 * torch.stack([t.double().norm() for t in theirs.values()]).norm().item()
    worst = 0.0
    for name, tensor in theirs.items():
        difference = (ours[name].double() - tensor.double()).norm().item()
        worst = max(worst, difference / max(tensor.double().norm().item(), floor, 1e-300))
    return worst
