"""Own sums and buckets: launched early or late, once or again, the reduced sum is the same."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference
from torch import nn
from torch.utils.checkpoint import checkpoint

import ragtag
from ragtag.comm.group import SoloGroup
from ragtag.core.errors import ModelError
from ragtag.core.sampler import Sampler
from ragtag.runtime.gradients import GradientSums

STEPS = 5
BATCH = 10
SIZE = 60


def flagged():
    """Feature 0 is 1 in one sample of step 3 and of step 5, else 0: what the models below branch on."""
    x, y = cases.regression(SIZE).tensors
    x[:, 0] = 0.0
    sampler = Sampler(dataset_size=SIZE, global_batch_size=BATCH, seed=0, shuffle=True)
    x[sampler.indices(3, 0, 1)[0], 0] = 1.0
    x[sampler.indices(5, 9, 10)[0], 0] = 1.0
    return torch.utils.data.TensorDataset(x, y)


class Seldom(nn.Module):
    """A layer that most steps do not use, registered last: its bucket is the first to leave, without it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(6, 16)
        self.last = nn.Linear(16, 3)
        self.seldom = nn.Linear(16, 16)

    def forward(self, x):
        rows = x[:, :1] > 0.5
        x = torch.tanh(self.body(x))
        if rows.any():
            x = x + torch.where(rows, self.seldom(x), torch.zeros_like(x))
        return self.last(x)


class Repeated(nn.Module):
    """A shared layer, recomputed in backward, that some steps use once more: its gradient arrives in pieces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(6, 16)
        self.shared = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        rows = x[:, :1] > 0.5
        x = torch.tanh(self.body(x))
        x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        if rows.any():
            x = torch.where(rows, checkpoint(self.shared, x, use_reentrant=True), x)
        return self.last(x)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def train(build, **settings):
    model = build().double()
    heard = Lines()
    logger = logging.getLogger("ragtag")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        cases.mean_squares,
        flagged(),
        global_batch_size=BATCH,
        shares=(4, 6),
        config=ragtag.Config(bucket_bytes=1024, **{"check_replicas_every": 1, **settings}),
    )
    reports = list(trainer.steps(STEPS))
    trainer.close()
    logger.removeHandler(heard)
    return cases.values(model), cases.gradients(model), reports, [line for line in heard.lines if "again" in line]


def wired(wire):
    model = cases.mlp(torch.float32)
    trainer = ragtag.Trainer(
        model, cases.sgd(model), cases.mean_squares, cases.regression(dtype=torch.float32), global_batch_size=10,
        shares=(7, 3), config=ragtag.Config(bucket_bytes=1024, wire=wire),
    )  # fmt: skip
    gradients = []
    for _ in trainer.steps(3):
        gradients.append(cases.gradients(model))
    trainer.close()
    return gradients, cases.values(model)


def train_all():
    return {
        "seldom": train(Seldom),
        "repeated": train(Repeated),
        "repeated, small pieces": train(Repeated, micro_batch=2),
        "overlap": train(cases.mlp),
        "no overlap": train(cases.mlp, overlap=False),
        "fp32": wired("fp32"),
        "bf16": wired("bf16"),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, train_all)


@pytest.mark.parametrize(
    ("case", "build"), [("seldom", Seldom), ("repeated", Repeated), ("repeated, small pieces", Repeated)]
)
def test_a_gradient_after_its_bucket_has_left_is_not_lost(two_ranks, case, build):
    model = build().double()
    history = plain_run(model, cases.adam(model), cases.sum_squares, flagged(), steps=STEPS, batch=BATCH)
    for results in two_ranks:
        values, gradients, reports, again = results[case]
        if case != "repeated, small pieces":  # there the last piece of a step may have no flagged sample
            assert len(again) == 1, "the case must make a bucket leave too early, once"
            assert "step 3" in again[0]
            assert min(reports[2].compute_s) > 0, "the time of the first attempt was forgotten"
        assert worst_difference(gradients, history[-1]) < 1e-12
        assert worst_difference(values, cases.values(model)) < 1e-12
        assert all(torch.equal(values[name], two_ranks[0][case][0][name]) for name in values)


def test_overlap_changes_no_bit(two_ranks):
    for results in two_ranks:
        early, late = results["overlap"], results["no overlap"]
        assert all(torch.equal(early[0][name], late[0][name]) for name in early[0])
        assert [report.loss for report in early[2]] == [report.loss for report in late[2]]


def test_a_bf16_wire_leaves_replicas_equal_and_errs_by_its_rounding(two_ranks):
    first, second = (results["bf16"] for results in two_ranks)
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    exact = two_ranks[0]["fp32"][0][0]
    error = worst_difference(first[0][0], exact)
    assert 1e-5 < error < 2 * 2**-8, error  # two ranks: one rounding of a part, one of the sum, 2**-9 each


# ---- one rank, without a trainer


def sums_of(parameters, **settings):
    settings = {"bucket_bytes": 1024, **settings}
    return GradientSums([(f"p{i}", p) for i, p in enumerate(parameters)], SoloGroup(1.0), **settings)


def accumulate(sums, losses):
    sums.begin()
    for position, loss in enumerate(losses):
        sums.begin_backward(last=position == len(losses) - 1)
        loss.backward()


def reduced(sums):
    sums.wait()
    return [
        (slot.index, slot.view.clone())
        for bucket in sums.buckets
        for slot in sorted(bucket.slots, key=lambda slot: slot.index)
    ]


def test_sums_of_half_precision_gradients_are_made_in_fp32():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sums = sums_of([weight])
    accumulate(sums, [weight.sum() for _ in range(300)])
    sums.launch_rest()
    ((_, total),) = reduced(sums)
    assert total.dtype == torch.float32
    assert total.tolist() == [300.0] * 3  # in bf16 a sum of ones stays at 256
    sums.install(1 / 300, sums.has_gradient())
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [1.0] * 3


def test_own_sums_survive_a_reduction():
    parameters = [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (300, 5, 7)]
    sums = sums_of(parameters)
    losses = [lambda: sum((p * p).sum() for p in parameters[:2]), lambda: parameters[0].sin().sum()]
    accumulate(sums, [loss() for loss in losses])
    sums.launch_rest()
    once = reduced(sums)
    for bucket in sums.buckets:
        bucket.flat.fill_(float("nan"))  # a reduction that failed half-way
    sums.launch_again(overlap=False)
    for (index, first), (same, second) in zip(once, reduced(sums)):
        assert index == same
        assert torch.equal(first, second)
    assert sums.has_gradient() == b"\x03"
    sums.install(2.0, b"\x03")
    assert torch.equal(parameters[0].grad, 2 * (2 * parameters[0] + parameters[0].cos()).detach())
    assert parameters[2].grad is None


def test_buckets_hold_one_dtype_each_and_every_parameter_once():
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    parameters = [nn.Parameter(torch.ones(100, dtype=dtype)) for dtype in dtypes]
    parameters.append(nn.Parameter(torch.ones(0)))
    parameters.append(nn.Parameter(torch.ones(())))
    sums = sums_of(parameters)
    assert sorted(slot.index for bucket in sums.buckets for slot in bucket.slots) == list(range(7))
    assert {bucket.flat.dtype for bucket in sums.buckets} == {torch.float32, torch.float64}
    accumulate(sums, [sum(p.double().sum() * (i + 1) for i, p in enumerate(parameters)) for _ in range(2)])
    sums.launch_rest()
    values = dict(reduced(sums))
    assert [float(values[index].sum()) for index in range(7)] == [200.0, 400.0, 600.0, 800.0, 1000.0, 0.0, 14.0]
    parts = [100.0 * 4, 100 * 16, 100 * 36, 100 * 64, 100 * 100, 14.0**2]
    assert float(sums.norm()) == pytest.approx(sum(parts) ** 0.5, rel=1e-6)
    sums.install(0.5, sums.has_gradient())
    assert [p.grad.dtype for p in parameters] == [*dtypes, torch.float32, torch.float32]


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_leave_in_one_order_whether_or_not_their_gradients_come(overlap):
    parameters = [nn.Parameter(torch.ones(300)) for _ in range(4)]
    order = []

    class Listening(SoloGroup):
        def all_reduce(self, flat, **options):
            order.append(next(i for i, bucket in enumerate(sums.buckets) if bucket.flat is flat))
            return super().all_reduce(flat, **options)

    sums = GradientSums(
        [(str(i), p) for i, p in enumerate(parameters)], Listening(1.0), bucket_bytes=1024, overlap=overlap
    )
    for used in ((0, 1, 2, 3), (1, 3), (0,), (), (2, 0)):
        order.clear()
        accumulate(sums, [sum(parameters[i].sum() for i in used)] if used else [])
        sums.launch_rest()
        assert order == [0, 1, 2, 3], used
        assert {index for index, value in reduced(sums) if value.any()} == set(used)


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(4, 2, sparse=True)
    sums = sums_of([embedding.weight])
    sums.begin()
    sums.begin_backward(last=True)
    with pytest.raises(ModelError, match="'p0' has a sparse gradient"):
        embedding(torch.tensor([1])).sum().backward()


def test_a_bf16_wire_refuses_wider_parameters_at_once():
    model = cases.mlp()
    with pytest.raises(ragtag.SettingError, match="float64"):
        ragtag.Trainer(
            model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8,
            config=ragtag.Config(wire="bf16"),
        )  # fmt: skip


def test_parameters_the_optimizer_got_from_elsewhere_are_refused():
    model = cases.mlp()
    optimizer = cases.sgd(model)
    trainer = ragtag.Trainer(model, optimizer, cases.mean_squares, cases.regression(), global_batch_size=8)
    list(trainer.steps(1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ModelError, match="not the model's"):
        list(trainer.steps(1))
