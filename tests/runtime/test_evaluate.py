"""An evaluation gives what one process gives, to the last bit, whoever computed what."""

import copy
import math
import pickle

import pytest
import torch
from tests.ranks import run_ranks, solo
from tests.runtime import cases
from torch import nn
from torch.nn import functional

import ragtag

SIZES = {"as large as the batch": 10, "ragged": 23, "fewer than ranks": 2, "one": 1}


class Augmented(torch.utils.data.Dataset):
    """Random numbers in the dataset: the same for a sample whoever reads it."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        x, y = cases.regression()[index]
        return x + torch.rand(()), y


def squares_and_metrics(model, batch):
    error = (model(batch[0]) - batch[1]).square().sum(1)
    return ragtag.Loss(error.sum(), len(error), {"largest": error.max(), "near": int((error < 1).sum())})


def only_some(model, batch):
    """Items that count are those with a positive feature: some runs have none of them."""
    counts = batch[0][:, 0] > 1.2
    error = (model(batch[0]) - batch[1]).square().sum(1)
    return ragtag.Loss(error[counts].sum(), counts.sum())


def nothing(model, batch):
    return ragtag.Loss(torch.zeros(()), 0, {"rate": 0})


def with_random_numbers(model, batch):
    return cases.mean_squares(model, (functional.dropout(batch[0], 0.3), batch[1]))


def accuracy(model, batch):
    return float((model(batch[0]).argmax(1) == batch[1].argmax(1)).double().mean())


def evaluate_all(num_workers=0):
    model = nn.Sequential(nn.BatchNorm1d(6), cases.mlp(), nn.Dropout(0.5)).double()
    model[0].eval()  # frozen statistics stay frozen
    trainer = ragtag.Trainer(
        model,
        cases.sgd(model),
        cases.mean_squares,
        cases.regression(),
        global_batch_size=10,
        loader={"num_workers": num_workers},
        config=ragtag.Config(unit=5),
    )
    list(trainer.steps(2))
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    values = {}
    for name, size in SIZES.items():
        values[name] = trainer.evaluate(cases.regression(size), squares_and_metrics)
    dataset = cases.regression(23)
    for metric in (only_some, nothing, with_random_numbers, accuracy):
        values[metric.__name__] = trainer.evaluate(dataset, metric)
    values["augmented"] = trainer.evaluate(Augmented(), cases.mean_squares)
    assert modes == [module.training for module in model.modules()]
    assert not modes[1]
    assert torch.equal(before, torch.get_rng_state()), "the script's own random numbers moved"
    plain = cases.values(model)
    trainer.close()
    return {name: (value.hex(), value.metrics, value.weight, value.samples) for name, value in values.items()}, plain


@pytest.fixture(scope="module")
def alone():
    return solo(evaluate_all)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_number_of_ranks_gives_the_same_bits(alone, world_size):
    for values, _ in run_ranks(world_size, evaluate_all, 1 if world_size == 2 else 0):
        assert repr(values) == repr(alone[0])  # repr: a mean over nothing is nan


def test_it_is_the_mean_of_a_plain_loop(alone):
    values, state = alone
    model = nn.Sequential(nn.BatchNorm1d(6), cases.mlp(), nn.Dropout(0.5)).double().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        for name, size in SIZES.items():
            x, y = (tensor[:size] for tensor in cases.regression(size).tensors)
            error = (model(x) - y).square().sum(1)
            value, metrics, weight, samples = values[name]
            assert float.fromhex(value) == pytest.approx(float(error.mean()), rel=1e-12)
            assert metrics["near"] == pytest.approx(float((error < 1).double().mean()), rel=1e-12)
            assert (weight, samples) == (size, size)
        x, y = cases.regression(23).tensors
        error = (model(x) - y).square().sum(1)[x[:, 0] > 1.2]
        assert 0 < len(error) < 5, "the case must have runs without any item"
        assert float.fromhex(values["only_some"][0]) == pytest.approx(float(error.mean()), rel=1e-12)
        right = (model(x).argmax(1) == y.argmax(1)).double().mean()
        assert float.fromhex(values["accuracy"][0]) == pytest.approx(float(right), rel=1e-12)
    value, metrics, weight, samples = values["nothing"]
    assert math.isnan(float.fromhex(value))
    assert math.isnan(metrics["rate"])
    assert (weight, samples) == (0.0, 23)


def make():
    model = cases.mlp()
    return ragtag.Trainer(model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=10)


def test_an_evaluation_is_a_float_that_can_be_copied_and_sent():
    value = make().evaluate(cases.regression(9), squares_and_metrics)
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (other, other.metrics, other.samples, other.weight) == (value, value.metrics, 9, 9.0)


def test_a_failed_evaluation_leaves_nothing_behind():
    trainer = make()
    rows = [torch.ones(6, dtype=torch.float64)] * 30
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(rows, lambda model, batch: 1 / 0)
    del rows[12:]
    rows[0] = rows[0] * 7
    assert trainer.evaluate(rows, lambda model, batch: float(batch.mean())) == pytest.approx(18 / 12)


def test_new_datasets_do_not_gather_loaders():
    trainer = make()
    for size in range(1, 12):
        trainer.evaluate(cases.regression(size), cases.mean_squares)
    assert len(trainer._eval_loaders) <= 4


@pytest.mark.parametrize(
    ("metric_fn", "kind", "message"),
    [
        (3, ragtag.SettingError, "metric_fn is a int"),
        (lambda model: 0, ragtag.SettingError, r"metric_fn must take \(model, batch\)"),
        (lambda model, batch: model(batch[0]), ragtag.LossError, "metric_fn returned a tensor that has shape"),
        (
            lambda model, batch: ragtag.Loss(torch.zeros(()), 1, {str(float(batch[0][0, 0])): 1}),
            ragtag.LossError,
            "metric_fn returned metrics",
        ),
    ],
)
def test_what_is_no_metric_is_refused(metric_fn, kind, message):
    with pytest.raises(kind, match=message):
        make().evaluate(cases.regression(), metric_fn)
