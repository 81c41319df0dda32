"""Everything that has to survive: gathered into one plain tree, put back from one, and sent from one rank to the
others.

The tree names nothing of the cluster or the plan, so it can be read by any number of ranks under any split and any
layout. Where state is cut into slices, the tree says what there is, and the tensors follow part by part: no rank ever
has room for all of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import torch

from ragtag.checkpoint.file import SavedFile
from ragtag.checkpoint.parts import Described, Part, batches
from ragtag.checkpoint.tree import filled, flatten, flatten_described, unflatten
from ragtag.comm.group import Group
from ragtag.core.errors import CheckpointError, PeerError
from ragtag.runtime.names import named_parameters, plain_name
from ragtag.runtime.out_of_memory import ran_out_of_memory
from ragtag.runtime.run import Run
from ragtag.runtime.zero.loading import Loading
from ragtag.runtime.zero.sharding import Sharding
from ragtag.runtime.zero.whole import Whole

SCHEMA = 1
T = TypeVar("T")


def identity(run: Run) -> dict[str, Any]:
    """What must be equal for a checkpoint to be continued exactly."""
    return {
        "global_batch_size": run.sampler.whole_batch_size,
        "seed": run.seed,
        "shuffle": run.sampler.shuffle,
        "dataset_size": run.sampler.dataset_size,
        "unit": run.plan.unit if run.by_unit else 1,
        "precision": run.precision,
        "seed_samples": run.config.seed_samples,
    }


def collect(run: Run, script: Mapping[str, Any], whole: Whole | None = None) -> dict[str, Any]:
    """The tree of a run's state at a step boundary.

    Args:
        whole: what is cut into slices, where something is; described in the tree, its parts to follow.

    Raises:
        CheckpointError: a module's state_dict computes something from parameters that are not here.
    """
    parameters = {} if whole is None else whole.parameters
    model = _module_state(run.model, run.sharding, parameters)
    return {
        "schema": SCHEMA,
        "identity": identity(run),
        "committed": run.committed,
        "script": dict(script),
        "model": {plain_name(name): value for name, value in model.items()},
        # Those that are not part of the state_dict (persistent=False) too: forward changes them.
        "buffers": dict(zip(run.buffers.names, run.buffers.values())),
        "optimizer": run.optimizer.state_dict() if whole is None else whole.optimizer,
        "optimizer_class": type(run.optimizer).__name__,
        "optimizer_parameters": _optimizer_parameters(run),
        "scheduler": None if run.scheduler is None else plain_scheduler(run.scheduler.state_dict()),
        "loss_scale": run.loss_scale.state_dict(),
        "state": {name: _module_state(item, run.sharding, parameters) for name, item in run.state.items()},
        "history": None if run.history is None else msgspec.to_builtins(run.history),
        "islands": run.islands.state_dict(run),
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
    own = {plain_name(name): value for name, value in _state_dict(run.model, run.sharding).items()}
    _check_tensors(own, tree["model"], source)
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


def restore(run: Run, tree: Any, source: str, parts: Iterable[Part] = ()) -> None:
    """Put a collected and checked tree back; where state is cut, a call of the group.

    Args:
        parts: all tensors, where state is cut: the tree describes them only.
    """
    part, sharding = "model", run.sharding
    try:
        loading: Loading | None = None
        if sharding is not None:
            loading, tree = _take(run, sharding, tree, parts)
        names = _state_dict(run.model, sharding)
        _load_module(run.model, {name: tree["model"][plain_name(name)] for name in names}, sharding)
        with torch.no_grad():
            for name, buffer in zip(run.buffers.names, run.buffers.values()):
                buffer.copy_(tree["buffers"][name])
        part = "optimizer"
        if loading is None:
            run.optimizer.load_state_dict(tree["optimizer"])
        else:
            loading.finish(tree["optimizer"])
        part = "scheduler"
        if run.scheduler is not None:
            run.scheduler.load_state_dict(tree["scheduler"])
        run.loss_scale.load_state_dict(tree["loss_scale"])
        for name, item in run.state.items():
            part = f"state[{name!r}]"
            if _sliced(item, sharding):
                _load_module(item, tree["state"][name], sharding)
            else:
                item.load_state_dict(placed_like(item.state_dict(), tree["state"][name]))
    except Exception as error:
        if isinstance(error, PeerError) or ran_out_of_memory(error):
            raise  # and whose memory it is, is said by whoever knows
        raise CheckpointError(
            f"{part} did not take its state from {source}: {type(error).__name__}: {error}. What came before it is "
            f"already loaded, so training cannot go on: start the script again."
        ) from error
    run.islands.load_state_dict(run, tree.get("islands"))
    run.jump_to(tree["committed"])
    run.non_finite_steps = 0


def _take(run: Run, sharding: Sharding, tree: Any, parts: Iterable[Part]) -> tuple[Loading, Any]:
    """Keep this rank's slices of what comes, and return the tree with everything that is not cut."""
    model = {name: tree["model"][plain_name(name)] for name in _state_dict(run.model, sharding)}
    sliced = _sliced(run.model, sharding)
    loading = sharding.loading({number: model[name] for name, number in sliced.items()}, tree["optimizer"])
    objects = []
    for name, item in run.state.items():
        cut, saved = _sliced(item, sharding), tree["state"][name]
        objects.append({key: value for key, value in saved.items() if key not in cut} if cut else saved)
    _, described = flatten_described({**tree, "state": objects})
    _, of_objects = flatten_described(objects)
    wanted = {each for each in described.values() if isinstance(each, Described) and not loading.cuts(each)}
    wanted |= {each for each in of_objects.values() if isinstance(each, Described)}
    whole = {each: each.empty() for each in wanted}
    for each in parts:
        loading.take(each)
        if each.of in whole:
            whole[each.of].view(-1)[each.first : each.first + each.values.numel()].copy_(each.values)
    return loading, filled(tree, whole)


def save(run: Run, script: Mapping[str, Any], write: Callable[[Any, Iterable[Part]], None], *, waits: str = "") -> None:
    """Let rank 0 write what all ranks have, while nothing is in flight.

    Where every rank holds all of the state, the others have nothing to do with it, and are told how it went only where
    they wait for it. Where it is cut, this is a call of the group.

    Args:
        write: called on rank 0 with the tree and, where it is described only, its parts.
        waits: as what all ranks wait for the end of writing; empty: nobody waits, if nobody has to.

    Raises:
        CheckpointError: of `write`; on every rank alike where they wait, or state is cut. Training can go on.
    """
    group, error = run.group, None
    whole = None if run.sharding is None else run.sharding.whole()
    together = waits or whole is not None
    if group.rank == 0:
        try:
            write(collect(run, script, whole), () if whole is None else whole.parts)
        except CheckpointError as own:
            if not together:
                raise
            error = own
    elif whole is not None:
        group.note(run.committed, "giving its slices to rank 0, which saves")
    for _ in () if whole is None else whole.parts:
        pass  # other ranks give what they have; rank 0 comes here with some left where it could not write
    if together:
        _tell(0, group, waits or "saved", error)


def streamed(saved: SavedFile | None, group: Group, name: str, source: int) -> tuple[Any, Iterator[Part]]:
    """Return the tree in a file that rank `source` has open, its tensors described, and what gives their parts, on
    every rank. A call of the group, as is going through the parts, at the end of which the file is closed."""
    told: list[Any] = []
    if saved is not None:
        shapes = [[key, each.shape, str(each.dtype).removeprefix("torch.")] for key, each in saved.described.items()]
        told = [saved.skeleton, shapes]
    try:
        skeleton, shapes = group.gather(name, told)[source]
    except BaseException:
        if saved is not None:
            saved.close()
        raise
    described = {key: Described(shape, getattr(torch, dtype)) for key, shape, dtype in shapes}

    def parts() -> Iterator[Part]:
        read = iter(()) if saved is None else saved.parts()
        try:
            for batch in batches(described):
                if saved is not None:
                    values = [next(read).values for _ in batch]
                else:
                    values = [torch.empty(last - first, dtype=described[key].dtype) for key, first, last in batch]
                group.broadcast(values, source=source)
                for (key, first, _), each in zip(batch, values):
                    yield Part(described[key], first, each)
        finally:
            if saved is not None:
                saved.close()

    return unflatten(skeleton, described), parts()


def on_rank(rank: int, group: Group, name: str, action: Callable[[], T]) -> T | None:
    """What `action` returns on one rank, None elsewhere; a CheckpointError of its is raised on every rank alike."""
    value, error = None, None
    if group.rank == rank:
        try:
            value = action()
        except CheckpointError as own:
            error = own
    _tell(rank, group, name, error)
    return value


def _tell(rank: int, group: Group, name: str, error: CheckpointError | None) -> None:
    """Raise on every rank the `error` that one has, if it has any."""
    refusal = group.gather(name, None if error is None else str(error))[rank]
    if refusal is not None:
        error = error or CheckpointError(refusal)
        error.origin_rank = rank
        raise error


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


def _state_dict(item: Any, sharding: Sharding | None) -> Mapping[str, Any]:
    """What `item` has to save; of parameters that lie in slices, names and shapes only."""
    if sharding is None or not isinstance(item, torch.nn.Module):
        return item.state_dict()
    with sharding.reading():
        return item.state_dict(keep_vars=True)


def _sliced(item: Any, sharding: Sharding | None) -> dict[str, int]:
    """By name in its `state_dict`, the numbers of the parameters that `item` has of those which are cut."""
    if sharding is None or not isinstance(item, torch.nn.Module):
        return {}
    known = sharding.number_of
    return {name: known[id(each)] for name, each in _state_dict(item, sharding).items() if id(each) in known}


def _module_state(item: Any, sharding: Sharding | None, parameters: Mapping[int, Described]) -> Mapping[str, Any]:
    """What `item` has to save, with what is described of parameters in their place."""
    own = _state_dict(item, sharding)
    if not parameters or not isinstance(item, torch.nn.Module):
        return own
    sliced = _sliced(item, sharding)
    kept = {id(each) for each in (*item.parameters(), *item.buffers())}
    _, computed = flatten_described({name: value for name, value in own.items() if id(value) not in kept})
    for name, value in computed.items():
        # Where parameters are not, not-a-number is.
        if isinstance(value, torch.Tensor) and bool(value.isnan().any()):
            raise CheckpointError(
                f"the state_dict of {type(item).__name__} computes '{name}' from parameters, which with layout 'zero3' "
                f"lie in slices on all ranks. Let it give the parameters themselves, or take Config(layout='zero2')."
            )
    return type(own)((name, parameters[sliced[name]] if name in sliced else value) for name, value in own.items())  # type: ignore[call-arg]


def _load_module(module: Any, saved: Mapping[str, Any], sharding: Sharding | None) -> None:
    """Give a module what was saved of it; of parameters that are cut, each rank has its slices already."""
    sliced = _sliced(module, sharding)
    if not sliced:
        module.load_state_dict(saved)
    elif rest := {name: value for name, value in saved.items() if name not in sliced}:
        module.load_state_dict(rest, strict=False)


def _optimizer_parameters(run: Run) -> list[list[str]]:
    if run.sharding is not None:
        return [[run.sharding.names[number] for number in numbers] for numbers in run.sharding.optimizer.groups]
    names = {id(parameter): name for name, parameter in named_parameters(run.model)}
    return [[names[id(parameter)] for parameter in group["params"]] for group in run.optimizer.param_groups]


def _check_tensors(own: Mapping[str, Any], saved: Mapping[str, Any], source: str) -> None:
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(f"{source} is of another model: it has no '{name}'.")
        if not (isinstance(tensor, torch.Tensor) and isinstance(saved[name], torch.Tensor | Described)):
            continue
        if tuple(saved[name].shape) != tensor.shape or saved[name].dtype != tensor.dtype:
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
