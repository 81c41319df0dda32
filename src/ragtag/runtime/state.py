"""Everything that has to survive: gathered into one plain tree, put back from one, and sent from one rank to the
others.

The tree names nothing of the cluster or the plan, so it can be read by any number of ranks under any split.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import torch

from ragtag.checkpoint.tree import flatten, unflatten
from ragtag.comm.group import Group
from ragtag.core.errors import CheckpointError
from ragtag.runtime.names import named_parameters, plain_name
from ragtag.runtime.out_of_memory import ran_out_of_memory
from ragtag.runtime.run import Run

SCHEMA = 1
T = TypeVar("T")


def identity(run: Run) -> dict[str, Any]:
    """What must be equal for a checkpoint to be continued exactly."""
    return {
        "global_batch_size": run.sampler.global_batch_size,
        "seed": run.seed,
        "shuffle": run.sampler.shuffle,
        "dataset_size": run.sampler.dataset_size,
        "unit": run.plan.unit if run.by_unit else 1,
        "precision": run.precision,
        "seed_samples": run.config.seed_samples,
    }


def collect(run: Run, script: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run's state at a step boundary."""
    return {
        "schema": SCHEMA,
        "identity": identity(run),
        "committed": run.committed,
        "script": dict(script),
        "model": _model_state(run.model),
        # Those that are not part of the state_dict (persistent=False) too: forward changes them.
        "buffers": dict(zip(run.buffers.names, run.buffers.values())),
        "optimizer": run.optimizer.state_dict(),
        "optimizer_class": type(run.optimizer).__name__,
        "optimizer_parameters": _optimizer_parameters(run),
        "scheduler": None if run.scheduler is None else plain_scheduler(run.scheduler.state_dict()),
        "loss_scale": run.loss_scale.state_dict(),
        "state": {name: item.state_dict() for name, item in run.state.items()},
        "history": None if run.history is None else msgspec.to_builtins(run.history),
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
    _check_tensors(_model_state(run.model), tree["model"], source)
    _check_tensors(dict(zip(run.buffers.names, run.buffers.values())), tree["buffers"], source)
    if (tree["scheduler"] is not None) != (run.scheduler is not None):
        with_or_without = "without" if tree["scheduler"] is None else "with"
        raise CheckpointError(f"{source} was saved {with_or_without} a scheduler; use the same here.")
    if set(tree["state"]) != set(run.state):
        raise CheckpointError(f"{source} holds state of {sorted(tree['state'])}, this run has {sorted(run.state)}.")
    if tree["optimizer_parameters"] != _optimizer_parameters(run):
        raise CheckpointError(
            f"{source} was saved with other optimizer parameter groups, or with parameters in another order within "
            f"them. Use the same groups."
        )


def restore(run: Run, tree: Any, source: str) -> None:
    """Put a collected and checked tree back."""
    part = "model"
    try:
        run.model.load_state_dict({name: tree["model"][plain_name(name)] for name in run.model.state_dict()})
        with torch.no_grad():
            for name, buffer in zip(run.buffers.names, run.buffers.values()):
                buffer.copy_(tree["buffers"][name])
        part = "optimizer"
        run.optimizer.load_state_dict(tree["optimizer"])
        part = "scheduler"
        if run.scheduler is not None:
            run.scheduler.load_state_dict(tree["scheduler"])
        run.loss_scale.load_state_dict(tree["loss_scale"])
        for name, item in run.state.items():
            part = f"state[{name!r}]"
            item.load_state_dict(placed_like(item.state_dict(), tree["state"][name]))
    except Exception as error:
        if ran_out_of_memory(error):
            raise  # and whose memory it is, is said by whoever knows
        raise CheckpointError(
            f"{part} did not take its state from {source}: {type(error).__name__}: {error}. What came before it is "
            f"already loaded, so training cannot go on: start the script again."
        ) from error
    run.jump_to(tree["committed"])
    run.non_finite_steps = 0


def on_rank(rank: int, group: Group, name: str, action: Callable[[], T]) -> T | None:
    """What `action` returns on one rank, None elsewhere; a CheckpointError of its is raised on every rank alike."""
    value, error = None, None
    if group.rank == rank:
        try:
            value = action()
        except CheckpointError as own:
            error = own
    refusal = group.gather(name, None if error is None else str(error))[rank]
    if refusal is not None:
        error = error or CheckpointError(refusal)
        error.origin_rank = rank
        raise error
    return value


def placed_like(current: Any, saved: Any) -> Any:
    """`saved`, its tensors on the devices where `current` has them: an average kept on an accelerator stays there."""
    if isinstance(saved, torch.Tensor):
        return saved.to(current.device) if isinstance(current, torch.Tensor) else saved
    if type(saved) in (dict, OrderedDict) and isinstance(current, Mapping):
        return type(saved)((key, placed_like(current.get(key), value)) for key, value in saved.items())
    if type(saved) in (list, tuple) and isinstance(current, list | tuple) and len(current) == len(saved):
        return type(saved)(placed_like(here, value) for here, value in zip(current, saved))
    return saved


def broadcast_tree(tree: Any, group: Group, name: str, source: int = 0) -> Any:
    """The tree of rank `source`, on every rank; the skeleton through the store, tensors through the ring. No pickle."""
    if group.world_size == 1:
        return tree
    described: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    if group.rank == source:
        skeleton, tensors = flatten(tree)
        described = [
            skeleton,
            [[key, list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in tensors.items()],
        ]
    skeleton, shapes = group.gather(name, described)[source]
    if group.rank != source:
        tensors = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, shape, dtype in shapes}
    hosted = [tensor.detach().cpu().contiguous() for tensor in tensors.values()]
    group.broadcast(hosted, source=source)
    return tree if group.rank == source else unflatten(skeleton, dict(zip(tensors, hosted)))


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    return {plain_name(name): value for name, value in model.state_dict().items()}


def _optimizer_parameters(run: Run) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in named_parameters(run.model)}
    return [[names[id(parameter)] for parameter in group["params"]] for group in run.optimizer.param_groups]


def _check_tensors(own: Mapping[str, Any], saved: Mapping[str, Any], source: str) -> None:
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(f"{source} is of another model: it has no '{name}'.")
        if not (isinstance(tensor, torch.Tensor) and isinstance(saved[name], torch.Tensor)):
            continue
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{source} is of another model: '{name}' is {tuple(saved[name].shape)} {saved[name].dtype} there, "
                f"{tuple(tensor.shape)} {tensor.dtype} here."
            )
    if extra := sorted(set(saved) - set(own)):
        raise CheckpointError(f"{source} is of another model: it has '{extra[0]}', this one does not.")


def plain_scheduler(state: Mapping[str, Any]) -> dict[str, Any]:
    """Schedulers keep callables and modules of their own in their state, and chained ones the states of others; only
    numbers and lists of them belong in a file."""
    return {key: _plain(value) for key, value in state.items() if _plain(value) is not _NOT_PLAIN}


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_scheduler(value) if all(isinstance(key, str) for key in value) else value
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [_plain(item) for item in value]
    try:
        flatten(value)
    except CheckpointError:
        return _NOT_PLAIN
    return value
