"""Ragged batches, fewer micro-batches than stages, ranks without a stage, loader workers, steps that are skipped."""

import math

import pytest
import torch

import ragtag
from tests.pipe.staged import staged, whole
from tests.ranks import run_ranks
from tests.runtime.reference import plain_run
from tests.zero.models import Tokens, sum_loss, tiny
from tests.zero.test_zero_exact import adam, loss_fn

STEPS = 8


class Ragged(Tokens):
    """Not a multiple of any batch: the last one of an epoch is small."""

    def __init__(self):
        super().__init__(count=23)


class Sometimes:
    """Not a number in the third step's first micro-batch, on the last stage."""

    calls, armed = 0, False

    def __call__(self, model, batch):
        loss = loss_fn(model, batch)  # other stages never come back from here
        self.calls += self.armed
        return ragtag.Loss(loss.total * math.nan, loss.count) if self.calls == 7 else loss


def train(settings, batch, loader=None, loss=loss_fn):
    model = tiny(depth=4)
    trainer = staged(model, adam(model.parameters()), loss, Ragged(), settings, batch=batch, loader=loader)
    if isinstance(loss, Sometimes):
        loss.armed = True
    reports = list(trainer.steps(STEPS))
    found = whole(trainer)
    trainer.close()
    return reports, found


@pytest.mark.parametrize(
    ("world_size", "settings", "batch", "loader"),
    [
        (3, {"stages": "0:0-1, 1:1-3, 2:3-4", "micro_batch": 4}, 7, None),
        (4, {"stages": "0:0-1, 1:1-2, 2:2-3, 3:3-4", "micro_batch": 5}, 5, None),
        (3, {"stages": "2:0-2, 0:2-4", "micro_batch": 2}, 6, None),
        (2, {"stages": "0:0-2, 1:2-4", "unit": 3}, 10, {"num_workers": 1}),
        (4, {"stages": "0:0-2, 1:2-4 / 2:0-3, 3:3-4", "micro_batch": 1}, 3, None),
    ],
    ids=["ragged", "one-micro-batch", "without-a-stage", "units-and-workers", "few-samples"],
)
def test_odd_numbers_of_samples_give_the_trajectory_of_one_process(world_size, settings, batch, loader):
    model = tiny(depth=4)
    plain_run(model, adam(model.parameters()), sum_loss, Ragged(), steps=STEPS, batch=batch)
    results = run_ranks(world_size, train, settings, batch, loader)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][1][name], parameter.detach(), rtol=1e-10, atol=1e-10)
    for reports, _ in results:
        assert [report.loss for report in reports] == [report.loss for report in results[0][0]]
        assert all(sum(report.shares) == report.samples for report in reports)


def test_a_step_that_is_not_finite_is_skipped_everywhere():
    settings = {"stages": "0:0-2, 1:2-4", "micro_batch": 2}
    results = run_ranks(2, train, settings, 6, None, Sometimes())
    for reports, _ in results:
        assert [report.number for report in reports if report.skipped] == [3]
        assert "rank 1" in next(report.skipped for report in reports if report.skipped)
