"""Promise P1 for separable runs: any split gives the gradient and the trajectory of one plain process."""

from itertools import chain

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference

import ragtag

SPLITS = {
    2: [(7, 3), (9, 1), (10, 0), (0, 10), (5, 5)],
    3: [(4, 3, 3), (8, 1, 1), (0, 7, 3), (1, 1, 1), (2, 0, 0)],
    4: [(4, 2, 2, 2), (1, 1, 0, 0)],
}
STEPS = 6


def train(shares, *, dtype=torch.float64, clip_norm=None, micro_batch=None, tokens=False, steps=STEPS, overlap=True):
    """Train one small case on this rank; returns gradients of every step, final values and reports."""
    model = cases.tagger(dtype) if tokens else cases.mlp(dtype)
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        cases.token_loss if tokens else cases.mean_squares,
        cases.Sentences() if tokens else cases.regression(dtype=dtype),
        global_batch_size=sum(shares),
        shares=shares,
        clip_norm=clip_norm,
        loader={"collate_fn": cases.pad} if tokens else {},
        config=ragtag.Config(micro_batch=micro_batch, bucket_bytes=1024, check_replicas_every=2, overlap=overlap),
    )
    gradients, reports = [], []
    for report in trainer.steps(steps):
        gradients.append(cases.gradients(model))
        reports.append(report)
    trainer.close()
    return gradients, cases.values(model), reports


def all_splits(splits):
    return [
        [
            train(shares),
            train(shares, micro_batch=2, overlap=False),
            train(shares, clip_norm=0.05, micro_batch=1),
            train(shares, tokens=True, micro_batch=2),
            train(shares, dtype=torch.float32, clip_norm=0.05),
        ]
        for shares in splits
    ]


def reference(batch, *, dtype=torch.float64, clip_norm=None, tokens=False):
    model = cases.tagger(dtype) if tokens else cases.mlp(dtype)
    history = plain_run(
        model,
        cases.adam(model),
        cases.sum_tokens if tokens else cases.sum_squares,
        cases.Sentences() if tokens else cases.regression(dtype=dtype),
        steps=STEPS,
        batch=batch,
        clip_norm=clip_norm,
        **({"collate": cases.pad} if tokens else {}),
    )
    return history, cases.values(model)


@pytest.mark.parametrize("world_size", sorted(SPLITS))
def test_any_split_equals_one_plain_process(world_size):
    splits = SPLITS[world_size]
    by_rank = run_ranks(world_size, all_splits, splits)
    for index, shares in enumerate(splits):
        batch = sum(shares)
        expected = [
            (reference(batch), 1e-12),
            (reference(batch), 1e-12),
            (reference(batch, clip_norm=0.05), 1e-12),
            (reference(batch, tokens=True), 1e-12),
            (reference(batch, dtype=torch.float32, clip_norm=0.05), 1e-6),
        ]
        for variant, ((gradients, values), tolerance) in enumerate(expected):
            for rank in range(world_size):
                own_gradients, own_values, reports = by_rank[rank][index][variant]
                first = worst_difference(own_gradients[0], gradients[0])
                assert first <= tolerance, (shares, variant, rank, first)
                if tolerance < 1e-10:  # trajectories are asserted in fp64 (Adam amplifies fp32 rounding)
                    assert max(map(worst_difference, own_gradients, gradients)) < 1e-10
                    assert worst_difference(own_values, values) < 1e-10, (shares, variant, rank)
                assert all(torch.equal(own_values[n], by_rank[0][index][variant][1][n]) for n in own_values)
                assert [str(r.loss) for r in reports] == [str(r.loss) for r in by_rank[0][index][variant][2]]
                assert all(sum(r.shares) == r.samples for r in reports)


def test_a_single_plain_process_is_the_reference_too():
    gradients, values, reports = run_ranks(1, train, (10,), timeout=60)[0]
    expected, expected_values = reference(10)
    assert max(map(worst_difference, gradients, expected)) < 1e-12
    assert worst_difference(values, expected_values) < 1e-12
    assert [r.number for r in reports] == list(range(1, STEPS + 1))
    assert [r.samples for r in reports] == [10, 10, 3, 10, 10, 3]


class Remembering(torch.utils.data.Dataset):
    """Gives its own index, so that a loss can write down which samples it saw."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return torch.tensor([float(index)], dtype=torch.float64)


def seen(shares):
    model = torch.nn.Linear(1, 1).double()
    rows: list[list[int]] = []

    def loss_fn(model, batch):
        if model.training and recording:
            rows[-1].extend(int(value) for value in batch.flatten())
        return model(batch).square().mean()

    recording = False
    trainer = ragtag.Trainer(
        model,
        cases.sgd(model, lr=1e-6),
        loss_fn,
        Remembering(),
        global_batch_size=8,
        shares=shares,
        seed=3,
        config=ragtag.Config(micro_batch=3),
    )
    recording = True
    rows.append([])
    for _ in trainer.steps(15):
        rows.append([])
    trainer.close()
    return rows[:-1]


def test_the_same_samples_in_every_step_whatever_the_split_and_each_once_an_epoch():
    one = seen((8,))
    assert [len(rows) for rows in one] == [8, 8, 8, 8, 5] * 3
    for epoch in range(3):
        assert sorted(chain(*one[5 * epoch : 5 * epoch + 5])) == list(range(37))
    for shares in ((5, 3), (4, 2, 2)):
        by_rank = run_ranks(len(shares), seen, shares)
        for step, expected in enumerate(one):
            assert sorted(chain(*(rows[step] for rows in by_rank))) == sorted(expected), (shares, step)
