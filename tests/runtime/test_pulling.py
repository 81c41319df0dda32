"""The pulled tail: gradients exact, every sample once, whoever computes it."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, plain_unit_run, worst_difference
from tests.runtime.test_units import classify, classify_sum, images, network

import ragtag

STEPS = 14


class Uneven:
    """A loss that takes long on one rank after another, which no plan made beforehand can follow."""

    slow = False

    def __call__(self, model, batch):
        time.sleep((0.012 if self.slow else 0.0005) * len(batch[0]))
        return cases.mean_squares(model, batch)


def pull(world_size):
    model, loss_fn, reports = cases.mlp(), Uneven(), []
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        loss_fn,
        cases.regression(61),
        global_batch_size=24,
        config=ragtag.Config(pull=True, bucket_bytes=1024, check_replicas_every=1),
    )
    for report in trainer.steps(STEPS):
        reports.append(report)
        loss_fn.slow = report.number % world_size == trainer.rank
    trainer.close()
    return cases.values(model), reports, trainer.plan


@pytest.mark.parametrize("world_size", [2, 4])
def test_pulled_work_gives_the_gradient_of_one_process(world_size):
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(61), steps=STEPS, batch=24)
    results = run_ranks(world_size, pull, world_size)
    moved = False
    for values, reports, plan in results:
        assert worst_difference(values, cases.values(model)) < 1e-10
        assert plan.pulled, "nothing was pulled"
        assert [report.samples for report in reports] == [24, 24, 13] * 4 + [24, 24]
        assert all(sum(report.shares) == report.samples for report in reports)
        moved = moved or len({report.shares for report in reports if report.samples == 24}) > 2
    assert moved, "the shares of a step never differed from the plan's"


def pull_units():
    model = network("dropout batchnorm")

    def loss_fn(model, batch):
        time.sleep(random.SystemRandom().choice([0.001, 0.008]))
        return classify(model, batch)

    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        loss_fn,
        images(),
        global_batch_size=18,
        loader={"num_workers": 1},
        config=ragtag.Config(unit=2, pull=True),
    )
    list(trainer.steps(STEPS))
    trainer.close()
    return cases.values(model), trainer.plan


def test_pulled_units_with_dropout_batchnorm_and_loader_workers():
    model = network("dropout batchnorm")
    plain_unit_run(model, cases.adam(model), classify_sum, images(), steps=STEPS, batch=18, unit=2)
    for values, plan in run_ranks(3, pull_units):
        assert plan.pulled
        assert worst_difference(values, cases.values(model)) < 1e-12


def test_one_process_pulls_from_nobody():
    values, reports, plan = pull(1)
    assert plan.pulled == ()
    assert torch.isfinite(values["0.weight"]).all()
    assert len(reports) == STEPS


def slower_second_rank():
    def loss_fn(model, batch):
        time.sleep((0.004 if trainer_rank else 0.001) * len(batch[0]))
        return cases.mean_squares(model, batch)

    trainer_rank = int(os.environ["RANK"])
    model = cases.mlp()
    trainer = ragtag.Trainer(
        model, cases.sgd(model), loss_fn, cases.regression(50), global_batch_size=50, config=ragtag.Config(pull=False)
    )
    reports = list(trainer.steps(8))
    decisions = trainer.decisions
    trainer.close()
    return reports, decisions


def test_shares_follow_speed_and_each_report_names_the_plan_its_step_ran_under():
    for reports, decisions in run_ranks(2, slower_second_rank):
        first = decisions[0]
        assert first.step < 6
        before, after = reports[first.step - 1], reports[first.step]
        assert before.shares == (25, 25)
        assert before.plan_id != first.plan.id
        assert after.plan_id == first.plan.id
        assert after.shares == first.plan.shares
        assert after.shares[0] > 30


def train_from_the_same_state_again(directory):
    model = cases.mlp()
    config = ragtag.Config(pull=True, micro_batch=2)
    trainer = ragtag.Trainer(
        model, cases.adam(model), cases.mean_squares, cases.regression(61), global_batch_size=24, config=config
    )
    path, losses, pulled = Path(directory, "state.safetensors"), [], 0
    list(trainer.steps(6))
    trainer.save(path)
    for _ in range(3):
        losses.append([])
        for report in trainer.steps(6):
            losses[-1].append(report.loss)
            pulled += bool(trainer.plan.pulled)
        trainer.load(path, replay=False)
    trainer.close()
    return losses, pulled


def test_steps_that_are_done_again_after_a_load_are_pulled_anew(tmp_path):
    for losses, pulled in run_ranks(3, train_from_the_same_state_again, str(tmp_path)):
        assert pulled
        for again in losses[1:]:
            assert again == pytest.approx(losses[0], rel=1e-10)
