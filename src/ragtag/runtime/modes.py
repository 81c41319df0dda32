"""Temporary evaluation mode that gives every module exactly the mode it had, frozen submodules included."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Put the whole model into training or evaluation mode; afterwards each module has its own mode again."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training
