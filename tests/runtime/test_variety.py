"""Kinds of models, optimizers, batches and precisions, each against one plain process."""

import copy
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run, worst_difference
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ragtag

SHARES = (6, 0, 4)


def run(model, optimizer, loss_fn, dataset, *, steps=4, shares=None, **options):
    config = options.pop("config", ragtag.Config(bucket_bytes=1024, micro_batch=3, check_replicas_every=1))
    trainer = ragtag.Trainer(
        model, optimizer, loss_fn, dataset, global_batch_size=10, shares=shares, config=config, **options
    )
    reports = list(trainer.steps(steps))
    trainer.close()
    return reports


# Each builder returns (model, optimizer, loss_fn, sum_loss, dataset, trainer options, plain options).


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def tied():
    model = Tied().double()
    return (
        model,
        cases.adam(model),
        cases.token_loss,
        cases.sum_tokens,
        cases.Sentences(),
        {"loader": {"collate_fn": cases.pad}},
        {"collate": cases.pad},
    )


class Partly(nn.Module):
    """One frozen layer, one that is never used, one that only samples with a large first feature use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.seldom = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.frozen(x))
        rows = x[:, 0] > 0.5
        if rows.any():
            x = x + torch.where(rows[:, None], self.seldom(x), torch.zeros_like(x))
        return self.last(x)


def partly():
    model = Partly().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, optimizer, cases.mean_squares, cases.sum_squares, cases.regression(), {}, {}


def groups():
    model = cases.mlp()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.2},
        ],
        lr=0.05,
        momentum=0.9,
    )
    return model, optimizer, cases.mean_squares, cases.sum_squares, cases.regression(), {}, {}


def scheduled():
    model = cases.mlp()
    optimizer = cases.sgd(model)
    make = lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5)  # noqa: E731
    return (
        model,
        optimizer,
        cases.mean_squares,
        cases.sum_squares,
        cases.regression(),
        {"scheduler": make},
        {"scheduler": make},
    )


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Nested(torch.utils.data.Dataset):
    def __init__(self):
        self.base = cases.regression()

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        x, y = self.base[index]
        return {"inputs": (x[:3], {"rest": x[3:]}), "target": y, "name": f"sample {index}", "number": index}


class Wrapped(nn.Module):
    """Takes a nested batch, returns an object with the mean over all target *elements* as `.loss`."""

    def __init__(self):
        super().__init__()
        self.body = cases.mlp()

    def forward(self, batch):
        first, more = batch["inputs"]
        logits = self.body(torch.cat([first, more["rest"]], dim=1))
        return Output(functional.mse_loss(logits, batch["target"]), logits)


def nested_loss(model, batch):
    output = model(batch)
    assert all(name.startswith("sample") for name in batch["name"])
    return ragtag.Loss.from_mean(output.loss, output.logits.numel())


def nested_sum(model, batch):
    output = model(batch)
    return output.loss * output.logits.numel(), output.logits.numel()


def nested():
    model = Wrapped()
    return model, cases.adam(model), nested_loss, nested_sum, Nested(), {}, {}


class Recomputed(nn.Module):
    """Activation checkpointing; the shared layer's gradient arrives twice in one backward when re-entrant."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(9)
        self.reentrant = reentrant
        self.first = nn.Linear(6, 8)
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=self.reentrant))
        return self.last(x)


def recomputed():
    model = Recomputed(False).double()
    return model, cases.adam(model), cases.mean_squares, cases.sum_squares, cases.regression(), {}, {}


def recomputed_reentrant():
    model = Recomputed(True).double()
    return model, cases.adam(model), cases.mean_squares, cases.sum_squares, cases.regression(), {}, {}


BUILDERS = {f.__name__: f for f in (tied, partly, groups, scheduled, nested, recomputed, recomputed_reentrant)}


def train_builders():
    results = {}
    for name, build in BUILDERS.items():
        model, optimizer, loss_fn, _, dataset, options, _ = build()
        reports = run(model, optimizer, loss_fn, dataset, shares=SHARES, **options)
        results[name] = (cases.gradients(model), cases.values(model), [r.lr for r in reports])
    return results


@pytest.fixture(scope="module")
def three_ranks():
    return run_ranks(3, train_builders)


@pytest.mark.parametrize("name", BUILDERS)
def test_each_kind_equals_one_plain_process(three_ranks, name):
    model, optimizer, _, sum_loss, dataset, _, plain = BUILDERS[name]()
    plain = dict(plain)
    if "scheduler" in plain:
        plain["scheduler"] = plain["scheduler"](optimizer)
    history = plain_run(model, optimizer, sum_loss, dataset, steps=4, batch=10, **plain)
    for results in three_ranks:
        gradients, values, _ = results[name]
        assert gradients.keys() == history[-1].keys()  # an unused parameter keeps grad = None
        assert worst_difference(gradients, history[-1]) < 1e-11
        assert worst_difference(values, cases.values(model)) < 1e-11


def test_scheduler_steps_once_a_step_whatever_the_number_of_ranks(three_ranks):
    assert three_ranks[1]["scheduled"][2] == [0.05, 0.05, 0.025, 0.025]


def test_an_unused_parameter_is_not_decayed(three_ranks):
    before = Partly().double().unused.weight
    assert torch.equal(three_ranks[0]["partly"][1]["unused.weight"], before)


def optimizers_by_callable():
    values = []
    for optimizer in (lambda ps: torch.optim.SGD(ps, lr=0.1), torch.optim.Adam):
        model = cases.mlp()
        run(model, optimizer, cases.mean_squares, cases.regression(), shares=(7, 3))
        values.append(cases.values(model))
    return values


def test_optimizer_as_callable():
    ours = run_ranks(2, optimizers_by_callable)[0]
    for values, make in zip(
        ours, (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda m: torch.optim.Adam(m.parameters()))
    ):
        model = cases.mlp()
        plain_run(model, make(model), cases.sum_squares, cases.regression(), steps=4, batch=10)
        assert worst_difference(values, cases.values(model)) < 1e-11


def compiled():
    model = cases.mlp()
    fast = torch.compile(model, backend="eager")
    run(fast, cases.adam(model), cases.mean_squares, cases.regression(), shares=(7, 3))
    return cases.values(model)


def test_a_compiled_model():
    model = cases.mlp()
    plain_run(model, cases.adam(model), cases.sum_squares, cases.regression(), steps=4, batch=10)
    assert worst_difference(run_ranks(2, compiled)[1], cases.values(model)) < 1e-11


class Average:
    """A minimal exponential moving average with a state_dict."""

    def __init__(self, model, start):
        self.model = model
        self.values = {name: p.detach() * start for name, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.values[name] = 0.9 * self.values[name] + 0.1 * p.detach()

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = dict(state)


def averaged(start_by_rank):
    import os

    model = cases.mlp()
    average = Average(model, start_by_rank[int(os.environ.get("RANK", "0"))])
    trainer = ragtag.Trainer(
        model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=10, state={"ema": average}
    )
    for _ in trainer.steps(3):
        average.update()
    trainer.close()
    return average.values


def test_further_state_takes_rank_0s_values():
    first, second = run_ranks(2, averaged, (1.0, 5.0))
    assert all(torch.equal(first[name], second[name]) for name in first)


PRECISIONS = [
    ("fp32", torch.bfloat16, 0.02),
    ("fp32", torch.float16, 4e-3),
    ("bf16", torch.float32, 0.02),
    ("fp16", torch.float32, 4e-3),
]


def low_precision():
    results = []
    for precision, dtype, _ in PRECISIONS:
        model = cases.mlp(dtype)
        reports = run(
            model,
            cases.sgd(model),
            cases.mean_squares,
            cases.regression(dtype=dtype),
            shares=(7, 3),
            precision=precision,
        )
        results.append(
            (cases.gradients(model), [r.skipped for r in reports], [p.grad.dtype for p in model.parameters()])
        )
    return results


def test_low_precisions_reduce_in_fp32_and_stay_close():
    model = cases.mlp()
    history = plain_run(model, cases.sgd(model), cases.sum_squares, cases.regression(), steps=4, batch=10)
    for results in run_ranks(2, low_precision):
        for (_, dtype, tolerance), (gradients, skipped, dtypes) in zip(PRECISIONS, results):
            assert set(dtypes) == {dtype}
            assert not any(skipped)
            assert worst_difference(gradients, history[-1]) < 5 * tolerance


class Poisoned(torch.utils.data.Dataset):
    """Sample 4 is NaN."""

    def __init__(self):
        self.base = cases.regression(20, dtype=torch.float32)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        x, y = self.base[index]
        return (x * math.nan, y) if index == 4 else (x, y)


def poisoned(precision):
    model = nn.Sequential(cases.mlp(torch.float32), nn.BatchNorm1d(3))
    optimizer = cases.sgd(model)
    trainer = ragtag.Trainer(
        model,
        optimizer,
        cases.mean_squares,
        Poisoned(),
        global_batch_size=10,
        shuffle=False,
        precision=precision,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        config=ragtag.Config(unit=2),
    )
    before = copy.deepcopy(cases.values(model))
    rows = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for report in trainer.steps(4):
            rows.append((report.skipped, report.lr))
            if report.number == 1:
                unchanged = all(torch.equal(before[n], v) for n, v in cases.values(model).items())
    trainer.close()
    return rows, unchanged, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_a_non_finite_value_anywhere_skips_the_step_everywhere_and_names_the_sample():
    for rank, (rows, unchanged, warned) in enumerate(run_ranks(2, poisoned, "fp32")):
        assert unchanged, "a skipped step changed parameters or buffers"
        assert [bool(skipped) for skipped, _ in rows] == [True, False, True, False]
        assert "samples 4, 5 on rank 0" in rows[0][0]
        assert [lr for _, lr in rows] == [0.05, 0.05, 0.025, 0.025], "the schedule counts unskipped steps"
        assert len(warned) == (2 if rank == 0 else 0)


def test_one_loss_scale_backs_off_together():
    first, second = run_ranks(2, poisoned, "fp16")
    assert first[0] == second[0]
    assert "loss scale lowered to 32768" in first[0][0][0]


def always_nan():
    model = cases.mlp()

    def loss_fn(model, batch):
        return cases.mean_squares(model, batch) * (math.nan if trained else 1.0)

    trained = []
    trainer = ragtag.Trainer(model, cases.sgd(model), loss_fn, cases.regression(), global_batch_size=10)
    trained.append(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in trainer.steps(30):
            pass


def test_ten_non_finite_steps_in_a_row_end_the_run():
    outcomes = run_ranks(2, always_nan, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome, ragtag.NonFiniteError | ragtag.PeerFailed)
        assert "10 steps in a row" in str(outcome)
        assert "rank 0" in str(outcome)
        assert "samples" in str(outcome)


def all_ignored():
    """Whole steps without a single labelled token."""
    dataset = cases.Sentences(size=12, empty_every=4)
    for row in dataset.rows[4:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    model = cases.tagger()
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        cases.token_loss,
        dataset,
        global_batch_size=4,
        shuffle=False,
        loader={"collate_fn": cases.pad},
    )
    reports = list(trainer.steps(3))
    trainer.close()
    return [(r.skipped, r.weight) for r in reports], cases.values(model)


def test_a_step_of_total_weight_zero_is_skipped():
    (rows, values), (_, other) = run_ranks(2, all_ignored)
    assert [bool(skipped) for skipped, _ in rows] == [False, True, False]
    assert rows[1][1] == 0
    assert all(bool(torch.isfinite(v).all()) and torch.equal(v, other[n]) for n, v in values.items())


def thawed():
    """The script freezes and unfreezes between steps."""
    model = cases.mlp()
    trainer = ragtag.Trainer(
        model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=10, shares=(7, 3)
    )
    for report in trainer.steps(4):
        model[0].requires_grad_(report.number >= 3)
    trainer.close()
    return cases.values(model)


def test_freezing_in_mid_run():
    model = cases.mlp()
    optimizer = cases.sgd(model)
    from ragtag.core.sampler import Sampler

    sampler = Sampler(dataset_size=23, global_batch_size=10, seed=0, shuffle=True)
    for step in range(1, 5):
        optimizer.zero_grad()
        rows = [cases.regression()[i] for i in sampler.indices(step, 0, sampler.batch(step).size)]
        total, weight = cases.sum_squares(model, torch.utils.data.default_collate(rows))
        (total / weight).backward()
        optimizer.step()
        model[0].requires_grad_(step >= 3)
    for values in run_ranks(2, thawed):
        assert worst_difference(values, cases.values(model)) < 1e-11
