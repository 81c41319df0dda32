"""The loader inside the trainer: who reads a sample, when and how often changes no bit."""

import os

import msgspec
import pytest
import torch
from tests.ranks import run_ranks, solo
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference
from torch.utils.data import Dataset, default_collate

import ragtag

BATCH = 10


class Augmented(Dataset):
    """Random augmentation from all three generators."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        import random

        import numpy

        x, y = cases.regression()[index]
        return x + torch.randn(6, dtype=torch.float64) * 0.1 + numpy.random.rand() + random.random(), y


def augmented(num_workers, shares=None):
    model = cases.mlp()
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        cases.mean_squares,
        Augmented(),
        global_batch_size=BATCH,
        shares=shares,
        loader={"num_workers": num_workers},
        config=ragtag.Config(micro_batch=4),
    )
    losses = [report.loss for report in trainer.steps(7)]  # three steps an epoch
    trainer.close()
    return cases.values(model), losses


def both(shares):
    return augmented(0, shares), augmented(2, shares)


def test_workers_and_ranks_change_nothing():
    alone = solo(augmented, 0)
    for here, ahead in run_ranks(2, both, (7, 3)):
        assert here[1] == ahead[1]
        assert all(torch.equal(value, ahead[0][name]) for name, value in here[0].items())
        assert worst_difference(here[0], alone[0]) < 1e-10
    losses = alone[1]
    assert len(set(losses)) == 7, "augmentation must differ between epochs"


class Logged(Dataset):
    """Writes every read into a file of this rank, whichever process reads."""

    def __init__(self, path):
        self.path = path
        self.base = cases.regression(200)

    def __len__(self):
        return 200

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        return *self.base[index], index


ALL_SHARES = [(8, 2), (2, 8), (5, 5), (0, 10)]


def adopting(folder, num_workers):
    """Another plan every three steps; returns values, samples used and samples read."""
    rank = int(os.environ.get("RANK", "0"))
    dataset = Logged(os.path.join(folder, f"reads-{num_workers}-{rank}"))
    used = []

    def loss_fn(model, batch):
        used.extend(batch[2].tolist())
        return cases.mean_squares(model, batch[:2])

    model = cases.mlp()
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        loss_fn,
        dataset,
        global_batch_size=BATCH,
        shares=ALL_SHARES[0],
        loader={"num_workers": num_workers, "prefetch": 2},
        config=ragtag.Config(check_replicas_every=1),
    )
    used.clear()
    plan_ids, shares = [], []
    for report in trainer.steps(3 * len(ALL_SHARES)):
        plan_ids.append(report.plan_id)
        shares.append(report.shares)
        if report.number % 3 == 0 and report.number < 3 * len(ALL_SHARES):
            epoch = report.number // 3
            plan = msgspec.structs.replace(
                trainer.plan, shares=ALL_SHARES[epoch], micro_batch=(10, 10), epoch=epoch, reason="test"
            )
            trainer._run.plan = plan
            trainer._run.keep_prefetched()
    trainer.close()
    with open(dataset.path) as file:
        read = [int(line) for line in file]
    return cases.values(model), used, read, plan_ids, shares


def adopting_both(folder):
    return [adopting(folder, 0), adopting(folder, 2)]


def test_another_plan_in_mid_flight_wastes_no_sample_and_changes_no_gradient(tmp_path):
    model = cases.mlp()
    steps = 3 * len(ALL_SHARES)
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(200), steps=steps, batch=BATCH)
    by_rank = run_ranks(2, adopting_both, str(tmp_path))
    for case, num_workers in enumerate((0, 2)):
        used_by_all: list[int] = []
        for rank, results in enumerate(by_rank):
            values, used, read, plan_ids, shares = results[case]
            assert worst_difference(values, cases.values(model)) < 1e-10
            assert shares == [ALL_SHARES[step // 3] for step in range(steps)]
            assert len(set(plan_ids)) == len(ALL_SHARES)
            used_by_all += used
            # Before training, the fingerprint reads three samples on every rank and the trial up to ten on rank 0.
            before = 3 + (10 if rank == 0 else 0)
            read = read[before:]
            assert set(used) <= set(read)
            if num_workers == 0:
                assert sorted(read) == sorted(used), "samples were read that nobody used here"
            else:
                assert len(read) == len(set(read)), "what was here and still ours was read again"
        assert len(used_by_all) == len(set(used_by_all)) == steps * BATCH


def noisy_collate(samples):
    x, y = default_collate(samples)
    return x + torch.rand(()), y


def stochastic(shares):
    model = cases.mlp()
    trainer = ragtag.Trainer(
        model, cases.adam(model), cases.mean_squares, cases.regression(64), global_batch_size=32, shares=shares,
        loader={"collate_fn": noisy_collate},
    )  # fmt: skip
    plan, nature = trainer.plan, trainer._run.nature
    list(trainer.steps(4))
    trainer.close()
    return cases.values(model), plan.unit, nature.separable, plan.reason


def test_a_stochastic_collate_fn_makes_the_run_non_separable_and_exact_by_unit():
    values, unit, separable, reason = solo(stochastic, None)
    assert not separable
    assert unit == 2
    assert "random numbers" in reason
    for own, *_ in run_ranks(2, stochastic, (22, 10)):
        assert worst_difference(own, values) < 1e-12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_same_step_can_be_read_again_after_an_error(num_workers):
    class Failing(Dataset):
        def __len__(self):
            return 23

        def __getitem__(self, index):
            return cases.regression()[index]

    fails = []

    def collate(samples):
        if fails:
            raise OSError(fails.pop())
        return default_collate(samples)

    model = cases.mlp()
    trainer = ragtag.Trainer(
        model, cases.adam(model), cases.mean_squares, Failing(), global_batch_size=BATCH,
        loader={"num_workers": num_workers, "collate_fn": collate}, config=ragtag.Config(micro_batch=4),
    )  # fmt: skip
    list(trainer.steps(1))
    fails.append("disk on fire")
    with pytest.raises(ragtag.DataError, match="disk on fire"):
        list(trainer.steps(1))
    assert [report.number for report in trainer.steps(2)] == [2, 3]
    trainer.close()
    plain = cases.mlp()
    plain_run(plain, cases.adam(plain), cases.sum_squares, cases.regression(), steps=3, batch=BATCH)
    assert worst_difference(cases.values(model), cases.values(plain)) < 1e-10
