"""A run that begins with a plan's shares: the first step has them, and from there they follow speeds, within memory."""

import os
import time

import pytest
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference

import ragtag
from ragtag.control.sharing import Start, initial_plan
from ragtag.core.config import micro_batches_from_environment, shares_from_environment
from ragtag.core.errors import SettingError

PER_SAMPLE_S = (0.004, 0.001)


def train(variables, steps=14):
    os.environ.update(variables)
    model, rank = cases.mlp(), int(os.environ["RANK"])

    def slow_loss(model, batch):
        time.sleep(PER_SAMPLE_S[rank] * len(batch[0]))
        return cases.mean_squares(model, batch)

    trainer = ragtag.Trainer(
        model, cases.adam(model), slow_loss, cases.regression(96), global_batch_size=24,
        config=ragtag.Config(pull=False),
    )  # fmt: skip
    first = trainer.plan
    rows = [step.shares for step in trainer.steps(steps)]
    last = trainer.plan
    trainer.close()
    return first, rows, last, cases.values(model)


def test_shares_begin_as_planned_follow_speeds_and_keep_to_each_ranks_memory():
    variables = {"RAGTAG_START_SHARES": "20,4", "RAGTAG_START_MICRO_BATCH": "none,3"}
    for first, rows, last, values in run_ranks(2, train, variables):
        assert first.shares == rows[0] == (20, 4)
        assert first.micro_batch == (20, 3)
        assert first.reason.startswith("as planned, to begin with: 20, 4; ")
        assert last.shares[0] < 14
        assert last.micro_batch[1] == 3
        model = cases.mlp()
        plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(96), steps=14, batch=24)
        assert worst_difference(values, cases.values(model)) < 1e-12


def test_pinned_shares_win_and_keep_to_the_plans_micro_batches():
    variables = {"RAGTAG_SHARES": "20,4", "RAGTAG_START_SHARES": "12,12", "RAGTAG_START_MICRO_BATCH": "8,none"}
    for first, rows, last, _ in run_ranks(2, train, variables, 6):
        assert {*rows} == {(20, 4)}
        assert first == last
        assert first.micro_batch == (8, 4)
        assert first.reason.startswith("pinned")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (Start(shares=(8, 8, 8)), r"the plan's shares = \(8, 8, 8\) has 3 numbers, but there are 2 ranks"),
        (Start(shares=(8, 8)), r"the plan's shares = \(8, 8\) sums to 16, but global_batch_size = 24"),
        (Start(micro_batch=(1, 2, 3)), r"micro-batches for 3 ranks, but there are 2.*ragtag plan"),
    ],
)
def test_a_plan_of_something_else_is_refused(start, said):
    with pytest.raises(SettingError, match=said):
        initial_plan(world_size=2, global_batch_size=24, unit=1, start=start)


def test_units_are_not_cut_for_a_plans_sake():
    plan = initial_plan(world_size=2, global_batch_size=24, unit=4, start=Start(shares=(13, 11), micro_batch=(2, None)))
    assert plan.shares == (12, 12)
    assert plan.micro_batch == (4, 4)
    assert plan.reason == "as planned, to begin with: 13, 11 (in whole units of 4: 12, 12)"


def test_what_the_environment_says():
    assert shares_from_environment({"RAGTAG_START_SHARES": "3, 5"}, "RAGTAG_START_SHARES") == (3, 5)
    assert shares_from_environment({"RAGTAG_START_SHARES": "3,5"}) is None
    assert micro_batches_from_environment({"RAGTAG_START_MICRO_BATCH": "8, None,2"}) == (8, None, 2)
    assert micro_batches_from_environment({}) is None


@pytest.mark.parametrize("text", ["8,0", "8,x", "-1", "8,,2"])
def test_wrong_micro_batches_are_named(text):
    with pytest.raises(SettingError, match=r"RAGTAG_START_MICRO_BATCH = .* is not valid.*8,none,2"):
        micro_batches_from_environment({"RAGTAG_START_MICRO_BATCH": text})


def test_wrong_shares_are_named():
    with pytest.raises(SettingError, match=r"RAGTAG_START_SHARES = '8,x' is not valid.*RAGTAG_START_SHARES=8,5,3"):
        shares_from_environment({"RAGTAG_START_SHARES": "8,x"}, "RAGTAG_START_SHARES")
