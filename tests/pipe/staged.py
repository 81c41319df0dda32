"""A trainer of a model in stages, and the model's parameters put together again."""

import torch

import ragtag


def staged(model, optimizer, loss_fn, dataset, settings, *, batch=12, **more):
    """A trainer with layout "pipeline"; `settings` are those of its Config."""
    torch.set_num_threads(1)
    config = ragtag.Config(layout="pipeline", **settings)
    return ragtag.Trainer(model, optimizer, loss_fn, dataset, global_batch_size=batch, config=config, **more)


def whole(trainer):
    """Every parameter by name, on rank 0; a call of all ranks."""
    return {name: p.detach().clone() for name, p in trainer._run.sharding.parameters().items()}
