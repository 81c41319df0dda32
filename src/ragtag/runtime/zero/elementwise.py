"""Whether an optimizer treats every element by itself, so that it can train slices of parameters.

The one idea: it is asked, not known by name. A copy of it makes three steps on a matrix, another one on the same matrix
in two pieces of a row; what differs needs whole matrices (Muon, Shampoo, factored Adafactor).
"""

import copy
from collections import OrderedDict

import torch

from ragtag.core.errors import ModelError

_STEPS = 3


def check_elementwise(optimizer: torch.optim.Optimizer, layout: str) -> None:
    """Return if slices can be trained.

    Raises:
        ModelError: they cannot; names the optimizer.
    """
    name = type(optimizer).__name__
    way_out = f"Take an elementwise one (SGD, Adam, AdamW, ...) with layout '{layout}', or Config(layout='replicated')."
    try:
        whole, cut = _trained(optimizer, (24,)), _trained(optimizer, (7, 17))
    except Exception as error:
        raise ModelError(
            f"{name} does not train slices of parameters: {type(error).__name__}: {error}. {way_out}"
        ) from error
    if not torch.allclose(whole, cut, rtol=1e-12, atol=1e-12):
        raise ModelError(f"{name} computes with whole matrices, so it cannot train slices of them. {way_out}")


def state_tensors_per_element(optimizer: torch.optim.Optimizer) -> float:
    """Return how many numbers it keeps for each element of a parameter; 0 for one that cannot be asked."""
    try:
        piece = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 24))
        copied = _copy(optimizer, [piece])
        piece.grad = torch.ones_like(piece)
        copied.step()
        kept = [value.numel() for value in copied.state[piece].values() if isinstance(value, torch.Tensor)]
        return sum(count for count in kept if count > 1) / piece.numel()
    except Exception:
        return 0.0


def _copy(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The same settings over other parameters, without state; only its first group's."""
    copied = copy.copy(optimizer)
    # Schedulers put a `step` of their own into the object, bound to the original; and hooks are the script's.
    copied.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    settings = {key: _plain(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
    copied.param_groups = [{**settings, "params": parameters}]
    copied.state = type(optimizer.state)(dict)
    return copied


def _plain(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _trained(optimizer: torch.optim.Optimizer, sizes: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    pieces = [start] if len(sizes) == 1 else list(start.reshape(-1).split(sizes))
    parameters = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    copied = _copy(optimizer, parameters)
    for _ in range(_STEPS):
        gradient = torch.randn(4, 6, dtype=torch.float64, generator=generator)
        gradients = [gradient] if len(sizes) == 1 else list(gradient.reshape(-1).split(sizes))
        for parameter, each in zip(parameters, gradients):
            parameter.grad = each.clone()
        copied.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
