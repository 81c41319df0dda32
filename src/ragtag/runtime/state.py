"""Everything that has to survive: gathered into one plain tree, put back from one, and sent from one rank to the
others.

The tree names nothing of the cluster or the plan, so it can be read by any number of ranks under any split.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ragtag.checkpoint.tree import flatten, unflatten
from ragtag.comm.group import Group
from ragtag.core.errors import CheckpointError
from ragtag.runtime.run import Run

SCHEMA = 1


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself where it was wrapped by `torch.compile`, so that names do not depend on that."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def identity(run: Run) -> dict[str, Any]:
    """What must be equal for a checkpoint to be continued exactly."""
    return {
        "global_batch_size": run.sampler.global_batch_size,
        "seed": run.seed,
        "shuffle": run.sampler.shuffle,
        "dataset_size": run.sampler.dataset_size,
        "unit": run.plan.unit if run.by_unit else 1,
        "precision": run.precision,
    }


def collect(run: Run, script: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run's state at a step boundary."""
    return {
        "schema": SCHEMA,
        "identity": identity(run),
        "committed": run.committed,
        "script": dict(script),
        "model": dict(bare(run.model).state_dict()),
        "optimizer": run.optimizer.state_dict(),
        "optimizer_class": type(run.optimizer).__name__,
        "scheduler": None if run.scheduler is None else _plain_scheduler(run.scheduler.state_dict()),
        "loss_scale": run.loss_scale.state_dict(),
        "state": {name: item.state_dict() for name, item in run.state.items()},
    }


def check(run: Run, tree: Any, source: str) -> None:
    """Raise CheckpointError if the tree is of another model, optimizer or run."""
    if not isinstance(tree, Mapping) or tree.get("schema") != SCHEMA:
        raise CheckpointError(f"{source} holds no training state of this version of ragtag.")
    for name, value in identity(run).items():
        if tree["identity"].get(name) != value:
            raise CheckpointError(
                f"{source} was saved with {name}={tree['identity'].get(name)!r}, this run has "
                f"{value!r}. Continuing would "
                f"not be the same training: use the saved value, or start anew from its weights."
            )
    if tree["optimizer_class"] != type(run.optimizer).__name__:
        raise CheckpointError(
            f"{source} was saved with {tree['optimizer_class']}, this run uses "
            f"{type(run.optimizer).__name__}. Use the same."
        )
    _check_tensors(bare(run.model), tree["model"], source)
    for kind, here in (("scheduler", run.scheduler is not None), ("state", bool(run.state))):
        if bool(tree[kind]) != here:
            raise CheckpointError(
                f"{source} was saved {'with' if tree[kind] else 'without'} a {kind}; use the same here."
            )
    if set(tree["state"]) != set(run.state):
        raise CheckpointError(f"{source} holds state of {sorted(tree['state'])}, this run has {sorted(run.state)}.")
    saved_groups, own_groups = tree["optimizer"]["param_groups"], run.optimizer.param_groups
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in own_groups]:
        raise CheckpointError(f"{source} was saved with other optimizer parameter groups. Use the same groups.")


def restore(run: Run, tree: Any) -> None:
    """Put a collected and checked tree back."""
    bare(run.model).load_state_dict(tree["model"])
    run.optimizer.load_state_dict(tree["optimizer"])
    if run.scheduler is not None:
        run.scheduler.load_state_dict(tree["scheduler"])
    run.loss_scale.load_state_dict(tree["loss_scale"])
    for name, item in run.state.items():
        item.load_state_dict(tree["state"][name])
    run.jump_to(tree["committed"])


def broadcast_tree(tree: Any, group: Group, name: str) -> Any:
    """Rank 0's tree, on every rank; the skeleton goes through the store, tensors through the ring. No pickle."""
    if group.world_size == 1:
        return tree
    described: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    if group.rank == 0:
        skeleton, tensors = flatten(tree)
        described = [
            skeleton,
            [[key, list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()],
        ]
    skeleton, shapes = group.gather(name, described)[0]
    if group.rank != 0:
        tensors = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, shape, dtype in shapes}
    hosted = [tensor.detach().cpu().contiguous() for tensor in tensors.values()]
    group.broadcast(hosted, source=0)
    return tree if group.rank == 0 else unflatten(skeleton, dict(zip(tensors, hosted)))


def _check_tensors(model: torch.nn.Module, saved: Mapping[str, torch.Tensor], source: str) -> None:
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(f"{source} is of another model: it has no '{name}'.")
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{source} is of another model: '{name}' is {tuple(saved[name].shape)} {saved[name].dtype} there, "
                f"{tuple(tensor.shape)} {tensor.dtype} here."
            )
    if extra := sorted(set(saved) - set(own)):
        raise CheckpointError(f"{source} is of another model: it has '{extra[0]}', this one does not.")


def _plain_scheduler(state: Mapping[str, Any]) -> dict[str, Any]:
    """Schedulers keep callables and modules of their own in their state; only numbers and lists of them belong in a
    file."""
    kept = {}
    for key, value in state.items():
        try:
            flatten(value)
        except CheckpointError:
            continue
        kept[key] = value
    return kept
