"""Models cut into stages anywhere: the trajectory of one process."""

import pytest
import torch

from tests.pipe.staged import staged, whole
from tests.ranks import run_ranks
from tests.runtime.reference import plain_run
from tests.zero.models import Tokens, sum_loss, tiny
from tests.zero.test_zero_exact import adam, loss_fn

STEPS, BATCH = 20, 12


def train(settings, model_settings, steps=STEPS, shares=None):
    model = tiny(**model_settings)
    optimizer = adam(model.parameters())
    trainer = staged(model, optimizer, loss_fn, Tokens(), settings, batch=BATCH, shares=shares, clip_norm=1.0)
    reports = list(trainer.steps(steps))
    found, plan = whole(trainer), trainer.plan
    trainer.close()
    return reports, found, plan


def expected(model_settings, steps=STEPS):
    model = tiny(**model_settings)
    plain_run(model, adam(model.parameters()), sum_loss, Tokens(), steps=steps, batch=BATCH, clip_norm=1.0)
    return dict(model.named_parameters())


def assert_equal_to_one_process(results, model_settings, steps=STEPS):
    reference = expected(model_settings, steps)
    found = results[0][1]
    assert set(found) == set(reference)
    for name, parameter in reference.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-10, atol=1e-10)
    assert len({tuple(report.loss for report in reports) for reports, *_ in results}) == 1, "all ranks tell the same"


@pytest.mark.parametrize(
    ("stages", "micro_batch"),
    [("0:0-1, 1:1-5", 3), ("1:0-2, 0:2-5", 5), ("0:0-1, 1:1-3, 2:3-5", 2), ("2:0-3, 0:3-4, 1:4-5", 12)],
    ids=["two", "unequal-micro-batches", "three", "one-micro-batch"],
)
def test_any_cut_gives_the_trajectory_of_one_process(stages, micro_batch):
    world_size = stages.count(":")
    results = run_ranks(world_size, train, {"stages": stages, "micro_batch": micro_batch}, {"depth": 5})
    assert_equal_to_one_process(results, {"depth": 5})


def test_pipelines_side_by_side_with_cuts_and_shares_of_their_own():
    settings = {"stages": "0:0-1, 1:1-4 / 3:0-3, 2:3-4", "micro_batch": 2}
    results = run_ranks(4, train, settings, {"depth": 4}, STEPS, (0, 5, 7, 0))
    assert_equal_to_one_process(results, {"depth": 4})
    assert all(report.shares == (0, 5, 7, 0) for report in results[0][0])


@pytest.mark.parametrize("more", [{"tied": True}, {"unused": True}], ids=["tied", "unused"])
def test_tied_weights_and_unused_parameters(more):
    results = run_ranks(2, train, {"stages": "0:0-1, 1:1-3", "micro_batch": 4}, more)
    assert_equal_to_one_process(results, more)


def test_stages_are_chosen_where_none_are_set():
    results = run_ranks(2, train, {"micro_batch": 3}, {"depth": 4}, 3)
    assert_equal_to_one_process(results, {"depth": 4}, 3)
    plan = results[0][2]
    assert plan.layout == "pipeline"
    assert [stage.stop for stage in plan.stages[0]][-1] == 4
    assert "layout pipeline" in plan.reason
