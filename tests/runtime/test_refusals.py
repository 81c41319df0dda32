"""A user's mistake gives one clear error that names what, where and what to type next."""

import copy
import time

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from torch import nn

import ragtag


def make(**changes):
    """A trainer that would work, but for `changes`."""
    model = changes.pop("model", None) or cases.mlp()
    arguments = {
        "optimizer": changes.pop("optimizer", None) or cases.sgd,
        "loss_fn": changes.pop("loss_fn", cases.mean_squares),
        "dataset": changes.pop("dataset", None) if "dataset" in changes else cases.regression(),
    }
    optimizer = arguments["optimizer"]
    if optimizer in (cases.sgd, cases.adam):
        optimizer = optimizer(model)
    settings = {"global_batch_size": 10, **changes}
    return ragtag.Trainer(model, optimizer, arguments["loss_fn"], arguments["dataset"], **settings)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


class Counting(nn.Module):
    """Changes a buffer of its own in forward."""

    def __init__(self):
        super().__init__()
        self.body = cases.mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.body(x)


def two_values(model, batch):
    return cases.mean_squares(model, batch), 1


def per_sample(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def detached(model, batch):
    return cases.mean_squares(model, batch).detach()


def frozen():
    return cases.mlp().requires_grad_(False)


def sparse():
    return nn.Sequential(nn.Embedding(4, 4, sparse=True))


def foreign():
    return torch.optim.SGD(cases.mlp().parameters(), lr=0.1)


MISTAKES = {
    "misspelt argument": ({"global_batchsize": 3}, ragtag.SettingError, "Did you mean 'global_batch_size'"),
    "setting of Config": ({"patience_s": 3}, ragtag.SettingError, r"Config\(patience_s=\.\.\.\)"),
    "batch of a wrong type": ({"global_batch_size": "10"}, ragtag.SettingError, "global_batch_size='10' is a str"),
    "batch of zero": ({"global_batch_size": 0}, ragtag.SettingError, "expected at least 1"),
    "precision": ({"precision": "fp61"}, ragtag.SettingError, "Did you mean 'fp16'"),
    "clip": ({"clip_norm": -1.0}, ragtag.SettingError, "clip_norm=-1.0"),
    "seed": ({"seed": 1.5}, ragtag.SettingError, "seed=1.5"),
    "shares sum": ({"shares": (7,)}, ragtag.SettingError, "sums to 7"),
    "shares length": ({"shares": (7, 3)}, ragtag.SettingError, "1 ranks"),
    "config": ({"config": {"unit": 3}}, ragtag.SettingError, "ragtag.Config"),
    "loader word": ({"loader": {"num_worker": 2}}, ragtag.SettingError, "Did you mean 'num_workers'"),
    "loader batch": ({"loader": {"batch_size": 2}}, ragtag.SettingError, "global_batch_size"),
    "state": ({"state": {"ema": 3}}, ragtag.SettingError, "state_dict"),
    "scheduler": ({"scheduler": 3}, ragtag.SettingError, "scheduler"),
    "empty dataset": ({"dataset": []}, ragtag.DataError, "empty"),
    "iterable dataset": ({"dataset": Stream()}, ragtag.DataError, "IterableDataset"),
    "no loss function": ({"loss_fn": 3}, ragtag.SettingError, "loss_fn is a int"),
    "loss of three arguments": ({"loss_fn": lambda model, x, y: 0}, ragtag.SettingError, r"\(model, batch\)"),
    "loss not a scalar": ({"loss_fn": per_sample}, ragtag.LossError, r"shape \(4,\).*expected a scalar"),
    "loss a tuple": ({"loss_fn": two_values}, ragtag.LossError, "Return the loss alone"),
    "loss without gradient": ({"loss_fn": detached}, ragtag.LossError, "without a gradient"),
    "loss None": ({"loss_fn": lambda model, batch: None}, ragtag.LossError, "returned None"),
    "plain-mean trap": (
        {
            "model": cases.tagger(),
            "loss_fn": cases.token_mean,
            "dataset": cases.Sentences(empty_every=1000),
            "loader": {"collate_fn": cases.pad},
        },
        ragtag.LossError,
        r"ragtag\.Loss\(losses\.sum\(\), num_tokens\)",
    ),
    "several optimizers": ({"optimizer": [1, 2]}, ragtag.ModelError, "list of 2"),
    "closure": ({"optimizer": lambda p: torch.optim.LBFGS(p)}, ragtag.ModelError, "LBFGS needs a closure"),
    "foreign optimizer": ({"optimizer": lambda p: foreign()}, ragtag.ModelError, "not the model's"),
    "unregistered buffer": ({"model": Counting()}, ragtag.ModelError, "'calls'"),
    "nothing to train": (
        {"model": frozen(), "optimizer": lambda p: foreign()},
        ragtag.ModelError,
        "no trainable",
    ),
    "wrapped": ({"model": nn.DataParallel(cases.mlp())}, ragtag.ModelError, "bare module"),
    "SyncBatchNorm": ({"model": nn.Sequential(cases.mlp(), nn.SyncBatchNorm(3))}, ragtag.ModelError, "SyncBatchNorm"),
    "sparse": (
        {"model": sparse()},
        ragtag.ModelError,
        "sparse=False",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_clear_error(mistake):
    changes, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message) as caught:
        make(**copy.copy(changes))
    assert isinstance(caught.value, ValueError)


def test_registering_the_module_accepts_its_buffers():
    model = Counting().double()
    trainer = make(model=model, state={"counting": model}, config=ragtag.Config(unit=5))
    list(trainer.steps(2))
    assert float(model.calls) == 2.0  # each of a step's units starts from the step's value and adds one


def test_forward_that_draws_random_numbers_only_later_is_named():
    drawing = False

    def loss_fn(model, batch):
        return cases.mean_squares(model, batch) + (torch.rand(()) * 0 if drawing else 0)

    trainer = make(loss_fn=loss_fn)
    drawing = True
    with pytest.raises(ragtag.ModelError, match="random numbers in step 1"):
        list(trainer.steps(1))


# ---- differences between ranks


def different(kind, patience_s=10.0):
    import os

    odd = os.environ["RANK"] == "1"
    model, dataset, options = cases.mlp(), cases.regression(), {}
    if odd and kind == "names":
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)).double()
    if odd and kind == "shapes":
        model[0] = nn.Linear(6, 16, bias=False).double()
        model[0].register_parameter("bias", nn.Parameter(torch.zeros(16, 1).double()))
    if odd and kind == "dtypes":
        model[4].float()
    if odd and kind == "length":
        dataset = cases.regression(21)
    if odd and kind == "sample":
        dataset.tensors[0][0, 0] += 1
    if kind == "seed":
        options["seed"] = int(odd)
    if kind == "config":
        options["config"] = ragtag.Config(patience_s=patience_s, bucket_bytes=1024 + int(odd))
    optimizer = cases.sgd(model, lr=0.05 + (0.01 if odd and kind == "lr" else 0.0))
    options.setdefault("config", ragtag.Config(patience_s=patience_s))
    ragtag.Trainer(model, optimizer, cases.mean_squares, dataset, global_batch_size=10, **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("names", "it has no parameter '4.weight'"),
        ("shapes", r"parameter '0.bias' has shape \(16, 1\), not \(16,\)"),
        ("dtypes", "parameter '4.weight' has dtype torch.float32, not torch.float64"),
        ("length", "its dataset has 21 samples, not 23"),
        ("sample", r"dataset\[0\] is another sample"),
        ("lr", "optimizer group 0 has lr=0.06"),
        ("seed", "seed is 1, not 0"),
        ("config", "config.bucket_bytes is 1025, not 1024"),
    ],
)
def test_ranks_that_were_started_differently_all_raise_the_same_error(kind, message):
    outcomes = run_ranks(3, different, kind, expect_failures=True)
    for outcome in outcomes:
        with pytest.raises(ragtag.DisagreementError, match=message):
            raise outcome
        assert "rank 1" in str(outcome)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert {outcome.origin_rank for outcome in outcomes} == {0}


# ---- one rank's own code fails


class Breaking(torch.utils.data.Dataset):
    def __init__(self, broken):
        self.base, self.broken = cases.regression(), broken

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        if self.broken and len(Breaking.reads) > 40:
            raise OSError("disk on fire")
        Breaking.reads.append(index)
        return self.base[index]

    reads: list[int] = []  # noqa: RUF012


def failing(where):
    import os

    odd = os.environ["RANK"] == "1"
    count = []

    def loss_fn(model, batch):
        count.append(1)
        if odd and where == "loss" and len(count) == 3:
            raise RuntimeError("boom in loss")
        return cases.mean_squares(model, batch)

    model = cases.mlp()
    trainer = ragtag.Trainer(
        model,
        cases.sgd(model),
        loss_fn,
        Breaking(odd and where == "dataset"),
        global_batch_size=10,
        shares=(4, 3, 3),
        config=ragtag.Config(patience_s=10.0),
    )
    for step in trainer.steps(50):
        if odd and where == "loop" and step.number == 3:
            with trainer:
                raise KeyError("boom in loop")


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("loss", RuntimeError, "boom in loss"),
        ("dataset", ragtag.DataError, "disk on fire"),
        ("loop", KeyError, "boom in loop"),
    ],
)
def test_an_error_on_one_rank_reaches_every_rank(where, kind, text):
    started = time.monotonic()
    outcomes = run_ranks(3, failing, where, expect_failures=True)
    assert time.monotonic() - started < 25
    with pytest.raises(kind, match=text):
        raise outcomes[1]
    for rank in (0, 2):
        with pytest.raises(ragtag.PeerFailed, match=text) as caught:
            raise outcomes[rank]
        assert caught.value.rank == 1


def drifting():
    import os

    model = cases.mlp()
    trainer = ragtag.Trainer(
        model,
        cases.sgd(model),
        cases.mean_squares,
        cases.regression(),
        global_batch_size=9,
        config=ragtag.Config(check_replicas_every=4),
    )
    for step in trainer.steps(8):
        if step.number == 2 and os.environ["RANK"] == "2":
            with torch.no_grad():
                model[2].bias[0] += 1e-9


def test_the_replica_check_names_the_first_parameter_that_differs():
    outcomes = run_ranks(3, drifting, expect_failures=True)
    for outcome in outcomes:
        with pytest.raises(ragtag.DisagreementError, match=r"step 4: .* on rank\(s\) 2"):
            raise outcome
