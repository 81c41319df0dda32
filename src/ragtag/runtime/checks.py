"""Is this something ragtag can train exactly? Each refusal names what it met and the way out.

Pure checks of the arguments of `Trainer`; they run before anything is sent, moved or started.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import UninitializedParameter

from ragtag.core.errors import ModelError, SettingError


def check_model(model: Any) -> None:
    """Raise ModelError for models that are wrapped, have nothing to train, or cannot be reduced."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
    name = type(model).__name__
    if name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or name.startswith("FSDP"):
        raise ModelError(f"model is wrapped in {name}. Pass the bare module: ragtag does the distribution.")
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ModelError(
                f"'{path}' is a SyncBatchNorm, whose statistics depend on who has which samples. Use BatchNorm: ragtag "
                f"computes it on fixed units and merges the statistics by count."
            )
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ModelError(f"'{path}' is lazy and has no parameters yet. Run one batch through the model first.")
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ModelError(f"'{path}' gives sparse gradients; ragtag reduces dense ones. Use sparse=False.")
    parameters = dict(model.named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError("the model has no trainable parameter. Set requires_grad on what should be trained.")
    for path, parameter in parameters.items():
        if parameter.is_meta:
            raise ModelError(
                f"parameter '{path}' is on the meta device. Fill it: model.to_empty(...), then initialise."
            )
        if parameter.is_complex():
            raise ModelError(f"parameter '{path}' is complex. Store it as torch.view_as_real and convert in forward.")
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1:
        raise ModelError(f"the model's parameters lie on several devices ({', '.join(devices)}). Put it on one.")


def make_optimizer(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Accept an optimizer over the model's parameters, or a callable from parameters to one.

    Raises:
        ModelError: several optimizers, one that needs a closure, or parameters of another model.
    """
    if isinstance(optimizer, list | tuple | Mapping):
        raise ModelError(
            f"optimizer is a {type(optimizer).__name__} of {len(optimizer)}; ragtag steps one optimizer. Put parameter "
            f"groups into one optimizer, or train the parts (a GAN's two networks) with one Trainer each."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ModelError(
                f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer of the "
                f"model's parameters, "
                f"or a callable such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
            )
        made = optimizer(model.parameters())
        if not isinstance(made, torch.optim.Optimizer):
            raise ModelError(f"the optimizer callable returned a {type(made).__name__}, not a torch.optim.Optimizer.")
        optimizer = made
    if _needs_closure(optimizer):
        raise ModelError(
            f"{type(optimizer).__name__} needs a closure that evaluates the model several times a "
            f"step; ragtag computes one "
            f"gradient a step. Use an optimizer whose step() takes no closure."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    owned: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ModelError(
                    f"the optimizer's group {index} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the "
                    f"model's. Make the optimizer after the model, from model.parameters()."
                )
            owned.add(id(parameter))
    if not any(p.requires_grad and id(p) in owned for p in model.parameters()):
        raise ModelError("the optimizer holds no trainable parameter of the model.")
    return optimizer


def check_wire(wire: str, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise SettingError for gradients that a bf16 wire cannot carry."""
    wide = [p.dtype for p in parameters if p.requires_grad and p.dtype.itemsize > 4]
    if wire == "bf16" and wide:
        raise SettingError(f"wire='bf16' does not carry gradients of {wide[0]} parameters. Use Config(wire='fp32').")


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    step = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any | None:
    """Accept a learning-rate scheduler on this optimizer, a callable from optimizer to one, or None."""
    if scheduler is None:
        return None
    if not hasattr(scheduler, "step"):
        if not callable(scheduler):
            raise SettingError(
                f"scheduler is a {type(scheduler).__name__}; expected a torch.optim.lr_scheduler object, or a callable "
                f"from the optimizer to one."
            )
        scheduler = scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise SettingError("scheduler was made for another optimizer than the one passed. Make it from that one.")
    return scheduler


def check_settings(
    *,
    loss_fn: Any,
    global_batch_size: Any,
    seed: Any,
    shuffle: Any,
    clip_norm: Any,
    state: Any,
) -> None:
    """Raise SettingError for arguments of a wrong type or range."""
    if not callable(loss_fn):
        raise SettingError(f"loss_fn is a {type(loss_fn).__name__}; expected a function of (model, batch).")
    _check_positional(loss_fn, "loss_fn")
    for name, value, least in (("global_batch_size", global_batch_size, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise SettingError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number.")
        if not least <= value < 2**63:
            raise SettingError(f"{name}={value} is out of range; expected at least {least}.")
    if not isinstance(shuffle, bool):
        raise SettingError(f"shuffle={shuffle!r} is a {type(shuffle).__name__}; expected True or False.")
    if clip_norm is not None and (
        isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not clip_norm > 0
    ):
        raise SettingError(f"clip_norm={clip_norm!r}; expected a number above 0, or None.")
    if not isinstance(state, Mapping):
        raise SettingError(f"state is a {type(state).__name__}; expected a dict from names to objects.")
    for name, item in state.items():
        if not isinstance(name, str):
            raise SettingError(f"state has the key {name!r}; expected a string.")
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise SettingError(
                f"state[{name!r}] is a {type(item).__name__} without state_dict and load_state_dict; it could not be "
                f"saved or sent to a rank that joins."
            )


def check_metric_fn(metric_fn: Any) -> None:
    """Raise SettingError unless it can be called with (model, batch)."""
    if not callable(metric_fn):
        raise SettingError(f"metric_fn is a {type(metric_fn).__name__}; expected a function of (model, batch).")
    _check_positional(metric_fn, "metric_fn")


def _check_positional(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise SettingError(f"{name} must take (model, batch): {error}.") from None


def unit_without_single_samples(unit: int, *, dataset_size: int, global_batch_size: int) -> int:
    """The largest unit up to `unit` that leaves no unit of one sample, which BatchNorm cannot normalise.

    Depends on the data and the batch only, so every cluster cuts alike.
    """
    sizes = {min(global_batch_size, dataset_size)}
    if ragged := dataset_size % global_batch_size:
        sizes.add(ragged)
    for candidate in range(unit, 1, -1):
        if all(size % candidate != 1 for size in sizes):
            return candidate
    return unit
