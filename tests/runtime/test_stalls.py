"""A rank whose data or forward does not come back: the others do its work, and every replica stays the same."""

import os
import time
from collections.abc import Callable

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, plain_unit_run, worst_difference
from tests.runtime.test_units import classify, classify_sum, images, network

import ragtag
from ragtag.core.errors import PeerFailed

STEPS, STALLS_AT, STALL_S = 24, 9, 0.8


class Slow:
    """A dataset that takes 2 ms a sample, and once much longer on the ranks in `stalling`."""

    def __init__(self, dataset, stalling):
        self.dataset, self.stalls = dataset, int(os.environ.get("RANK", "0")) in stalling
        self.number: Callable[[], int] = lambda: 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(0.002)
        if self.stalls and self.number() == STALLS_AT:
            self.stalls = False
            time.sleep(STALL_S)
        return self.dataset[index]


def train(where, stalling, settings=None, fail=False):
    model = cases.mlp()
    in_data = Slow(cases.regression(61), stalling if where == "data" else ())
    stalls = int(os.environ["RANK"]) in stalling and where == "forward"
    trainer = None

    def loss_fn(model, batch):
        nonlocal stalls
        time.sleep(0.003 * len(batch[0]))
        if stalls and trainer is not None and trainer._run.committed + 1 == STALLS_AT:
            stalls = False
            time.sleep(STALL_S)
            if fail:
                raise ValueError("the disk is gone")
        return cases.mean_squares(model, batch)

    config = ragtag.Config(check_replicas_every=1, bucket_bytes=1024, **(settings or {}))
    trainer = ragtag.Trainer(model, cases.adam(model), loss_fn, in_data, global_batch_size=24, config=config)
    in_data.number = lambda: trainer._run.committed + 1
    reports, ended_s = [], {}
    for report in trainer.steps(STEPS):
        reports.append(report)
        ended_s[report.number] = time.monotonic()
    score = trainer.evaluate(cases.regression(40), cases.mean_squares)
    trainer.close()
    return cases.values(model), reports, ended_s, float(score)


def same_as_one_process(results):
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(61), steps=STEPS, batch=24)
    for values, reports, *_ in results:
        assert worst_difference(values, cases.values(model)) < 1e-10
        assert [report.number for report in reports] == list(range(1, STEPS + 1))
        assert all(sum(report.shares) == report.samples for report in reports)
        assert [report.loss for report in reports] == [report.loss for report in results[0][1]]


@pytest.mark.parametrize("where", ["data", "forward"])
@pytest.mark.parametrize("settings", [{}, {"pull": True, "micro_batch": 2}], ids=["planned", "pulled"])
def test_the_others_go_on_without_a_rank_that_stalls(where, settings):
    results = run_ranks(3, train, where, (2,), settings)
    same_as_one_process(results)
    reports = results[0][1]
    assert reports[STALLS_AT - 1].shares[2] < reports[STALLS_AT - 1].shares[0]
    assert reports[STALLS_AT].shares[2] == 0, "the next step went on without it, too"
    assert reports[-1].shares[2] > 0, "it got its share again"
    others, stalled = results[0][2], results[2][2]
    assert others[STALLS_AT] < stalled[STALLS_AT] - STALL_S / 4, "nobody waited for it"


@pytest.mark.parametrize("stalling", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_whoever_stalls_even_all_at_once(stalling):
    results = run_ranks(3, train, "forward", stalling)
    same_as_one_process(results)


def test_of_two_ranks_one_goes_on_alone():
    results = run_ranks(2, train, "data", (1,))
    same_as_one_process(results)
    assert results[0][1][STALLS_AT].shares == (results[0][1][STALLS_AT].samples, 0)


def test_a_rank_that_is_not_covered_is_waited_for():
    results = run_ranks(2, train, "forward", (1,), {"cover_stalls": False})
    same_as_one_process(results)
    assert results[0][1][STALLS_AT - 1].shares[1] > 0
    assert results[0][1][STALLS_AT - 1].wall_s > STALL_S / 2


def test_an_error_after_the_stall_reaches_every_rank():
    outcomes = run_ranks(3, train, "forward", (1,), {}, True, expect_failures=True)
    assert isinstance(outcomes[1], ValueError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerFailed)
        assert "the disk is gone" in str(outcomes[rank])


def train_units():
    model = network("dropout batchnorm")
    stalls = os.environ["RANK"] == "1"

    def loss_fn(model, batch):
        nonlocal stalls
        time.sleep(0.02)
        result = classify(model, batch)
        if stalls and trainer._run.committed + 1 == STALLS_AT:
            stalls = False
            time.sleep(STALL_S)
        return result

    config = ragtag.Config(unit=2, check_replicas_every=1)
    trainer = ragtag.Trainer(model, cases.adam(model), loss_fn, images(), global_batch_size=18, config=config)
    reports = list(trainer.steps(STEPS))
    trainer.close()
    return cases.values(model), reports


def test_units_with_dropout_and_batchnorm():
    model = network("dropout batchnorm")
    plain_unit_run(model, cases.adam(model), classify_sum, images(), steps=STEPS, batch=18, unit=2)
    for values, reports in run_ranks(3, train_units):
        assert worst_difference(values, cases.values(model)) < 1e-12
        assert reports[STALLS_AT].shares[1] == 0


def test_what_the_stand_in_settles_travels_like_everything_else():
    results = run_ranks(3, train, "forward", (2,), {"wire": "fp32", "overlap": False})
    same_as_one_process(results)
    assert torch.isfinite(torch.tensor([value for *_, value in results])).all()
