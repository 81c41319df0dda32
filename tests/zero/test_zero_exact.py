"""Slices of any size, work of any share: the trajectory of one process."""

import pytest
import torch

import ragtag
from tests.ranks import run_ranks
from tests.runtime.reference import plain_run
from tests.zero.models import Tokens, sum_loss, tiny

STEPS, BATCH = 20, 12


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def loss_fn(model, batch):
    total, count = sum_loss(model, batch)
    return ragtag.Loss(total, count)


def train(settings, shares, model_settings, steps=STEPS):
    torch.set_num_threads(1)
    model = tiny(**model_settings)
    trainer = ragtag.Trainer(
        model,
        adam(model.parameters()),
        loss_fn,
        Tokens(),
        global_batch_size=BATCH,
        shares=shares,
        clip_norm=1.0,
        config=ragtag.Config(**settings),
    )
    losses = [report.loss for report in trainer.steps(steps)]
    sharding = trainer._run.sharding
    whole = sharding.parameters() if sharding is not None else dict(model.named_parameters())
    norm = [p.grad for p in model.parameters()]
    trainer.close()
    return losses, {name: p.detach().clone() for name, p in whole.items()}, norm is not None


def expected(model_settings, steps=STEPS):
    model = tiny(**model_settings)
    plain_run(model, adam(model.parameters()), sum_loss, Tokens(), steps=steps, batch=BATCH, clip_norm=1.0)
    return dict(model.named_parameters())


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("slices", "shares"),
    [((7, 2, 1), (7, 4, 1)), ((1, 1, 0), (12, 0, 0)), ((0, 0, 1), (5, 7, 0))],
    ids=["unequal", "one-computes", "one-holds"],
)
def test_any_slices_and_shares_give_the_trajectory_of_one_process(layout, slices, shares):
    settings = {"layout": layout, "slices": slices, "micro_batch": 3}
    results = run_ranks(len(shares), train, settings, shares, {})
    reference = expected({})
    whole = results[0][1]
    assert set(whole) == set(reference)
    for name, parameter in reference.items():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-10, atol=1e-10)
    assert len({tuple(losses) for losses, *_ in results}) == 1, "every rank tells the same loss"
