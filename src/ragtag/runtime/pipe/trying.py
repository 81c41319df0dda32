"""Whether a model can be cut into stages, tried by one rank on a few samples before step 1.

The one idea: cut between any two blocks, each stage sees not-a-number in place of every parameter that is not its own;
if the loss is then the very number that the whole model gives, nothing needs what it does not have.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ragtag.runtime.blocks import NamedBlocks
from ragtag.runtime.names import named_parameters
from ragtag.runtime.pipe.staged import StagedModel
from ragtag.runtime.pipe.users import BEFORE, Traced, refused, trace


def try_stages(model: nn.Module, blocks: NamedBlocks, loss: Callable[[], torch.Tensor]) -> Traced:
    """Return what each parameter is used by.

    Args:
        loss: one forward of the whole model on a few samples, to a scalar; draws no random numbers.

    Raises:
        ModelError: the model cannot be cut between these blocks; says why.
    """
    parameters = [parameter for _, parameter in named_parameters(model)]
    values: list[torch.Tensor] = []
    with torch.no_grad():
        traced = trace(model, blocks, parameters, lambda: values.append(loss().detach()))
    expected = values[0]
    why = _differs(model, blocks, traced, parameters, loss, expected)
    if why:
        # Weights may be used by a module that does not own them, such as an output layer that takes the embedding's.
        outer = frozenset((BEFORE, len(blocks)))
        users = [found if found <= frozenset(range(len(blocks))) else outer | found for found in traced.users]
        shared = Traced(users, traced.returns_tuple)
        if _differs(model, blocks, shared, parameters, loss, expected):
            raise refused(why)
        traced = shared
    return traced


def _differs(
    model: nn.Module,
    blocks: NamedBlocks,
    traced: Traced,
    parameters: Sequence[nn.Parameter],
    loss: Callable[[], torch.Tensor],
    expected: torch.Tensor,
) -> str:
    """Why a model cut between all blocks does not give the `expected` loss; empty: it does."""
    handed_on: torch.Tensor | None = None
    for index, (name, _) in enumerate(blocks):
        stage = StagedModel(blocks, traced.returns_tuple, index, index + 1)
        needed = {id(p) for p, users in zip(parameters, traced.users) if _uses(users, index, len(blocks))}
        try:
            with torch.no_grad(), _only(parameters, needed):
                ran = stage.run(loss, handed_on)
        except Exception as error:  # whatever the script's own code makes of what is not there
            return f"with block '{name}' alone on a device, forward fails ({type(error).__name__}: {error})"
        handed_on = ran.handed_on
        if ran.result is not None:
            if torch.equal(ran.result, expected) or (expected.isnan().all() and ran.result.isnan().all()):
                return ""
            return (
                "the loss of the model cut between all blocks is not that of the whole model: something that runs "
                "after the first block needs what is computed before it"
            )
        if not isinstance(handed_on, torch.Tensor):
            return f"what comes after block '{name}' is not given a tensor first"
    return "forward ends before the last block"


def _uses(users: frozenset[int], index: int, count: int) -> bool:
    return index in users or (index == 0 and BEFORE in users) or (index == count - 1 and count in users)


@contextmanager
def _only(parameters: Sequence[nn.Parameter], needed: set[int]) -> Iterator[None]:
    """In here all other parameters are not-a-number."""
    before: list[Any] = [parameter.data for parameter in parameters]
    for parameter in parameters:
        if id(parameter) not in needed and parameter.is_floating_point():
            absent = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = absent.expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before):
            parameter.data = value
