"""Promise P1 for non-separable runs: any assignment of units equals one plain process over the same units."""

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_unit_run, worst_difference
from torch import nn
from torch.nn import functional

import ragtag

UNIT = 4
BATCH = 18
SIZE = 46  # batches of 18, 18 and 10: the last unit of a batch has 2 samples


def images():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SIZE, 1, 6, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 5, (SIZE,), generator=generator))


def network(kind: str) -> nn.Module:
    torch.manual_seed(4)
    # A bias before BatchNorm has a gradient of exactly zero, whose rounding Adam would blow up.
    layers: list[nn.Module] = [nn.Conv2d(1, 4, 3, padding=1, bias="batchnorm" not in kind)]
    if "batchnorm" in kind:
        layers.append(nn.BatchNorm2d(4, momentum=None if "cumulative" in kind else 0.1))
    layers += [nn.ReLU(), nn.Flatten(), nn.Linear(144, 16)]
    if "dropout" in kind:
        layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 5)).double()


def classify(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def classify_sum(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def contrast(model, batch):
    """In-batch: every sample is told apart from its neighbours."""
    features = functional.normalize(model(batch[0]), dim=1)
    similarity = features @ features.T / 0.5
    return functional.cross_entropy(similarity, torch.arange(len(features)))


def contrast_sum(model, batch):
    return contrast(model, batch) * len(batch[1]), len(batch[1])


CASES = {
    "dropout": (classify, classify_sum, None),
    "batchnorm": (classify, classify_sum, UNIT),
    "batchnorm cumulative": (classify, classify_sum, UNIT),
    "dropout batchnorm": (classify, classify_sum, UNIT),
    "contrastive": (contrast, contrast_sum, UNIT),
}


def train_all(shares):
    results = {}
    for kind, (loss_fn, _, unit) in CASES.items():
        model = network(kind)
        trainer = ragtag.Trainer(
            model,
            cases.adam(model),
            loss_fn,
            images(),
            global_batch_size=BATCH,
            shares=shares,
            config=ragtag.Config(unit=unit, bucket_bytes=1024),
        )
        before = torch.get_rng_state()
        for _ in trainer.steps(7):
            pass
        assert torch.equal(before, torch.get_rng_state()), "the script's own random numbers moved"
        results[kind] = (cases.values(model), trainer.plan)
        trainer.close()
    return results


@pytest.mark.parametrize("shares", [(18,), (10, 8), (18, 0), (4, 10, 4), (1, 1, 16)], ids=str)
def test_any_assignment_of_units_equals_one_process(shares):
    by_rank = run_ranks(len(shares), train_all, shares)
    for kind, (_, sum_loss, unit) in CASES.items():
        plan = by_rank[0][kind][1]
        assert plan.unit == (unit or 1)
        model = network(kind)
        plain_unit_run(model, cases.adam(model), sum_loss, images(), steps=7, batch=BATCH, unit=plan.unit)
        for rank, results in enumerate(by_rank):
            difference = worst_difference(results[kind][0], cases.values(model))
            assert difference < 1e-12, (kind, shares, rank, difference)


def test_the_trial_says_why_a_run_is_not_separable():
    results = train_all((18,))
    assert "random numbers" in results["dropout"][1].reason
    assert "buffers" in results["batchnorm"][1].reason
