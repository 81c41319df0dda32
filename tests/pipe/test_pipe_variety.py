"""Models, optimizers and losses of many kinds in stages: each against a plain loop."""

import pytest
import torch
from torch import nn

import ragtag
from ragtag.watch.events import Step
from ragtag.watch.reader import read
from tests.pipe.staged import staged, whole
from tests.ranks import run_ranks
from tests.runtime.reference import plain_run
from tests.zero.models import Tokens, sum_loss, tiny
from tests.zero.test_zero_variety import adam, decay, frozen, groups, recomputing, sgd, tied

BATCH, STEPS = 12, 6


class Passing(nn.Module):
    """Blocks that return tuples and take a mask that the model makes of its input."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(Masked() for _ in range(4))
        self.out = nn.Linear(8, 17)

    def forward(self, tokens):
        mask = (tokens % 2 == 0).to(self.out.weight.dtype).unsqueeze(-1)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, mask, scale=0.5)[0]
        return self.out(hidden)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, hidden, mask, *, scale):
        return hidden + scale * torch.tanh(self.mix(hidden * mask)), mask


class Functional(nn.Module):
    """The output layer takes the embedding's weights, which it does not own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, tokens):
        return nn.functional.linear(self.layers(self.embed(tokens)), self.embed.weight)


class Skipping(nn.Module):
    """The output needs what runs before the blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 17)

    def forward(self, tokens):
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


def skipping():
    torch.manual_seed(3)
    return Skipping().double()


def passing():
    torch.manual_seed(3)
    return Passing().double()


def layers_of(model):
    return list(model.layers)


def functional():
    torch.manual_seed(3)
    return Functional().double()


def sequential():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(17, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 17)
    ).double()


def loss_fn(model, batch):
    total, count = sum_loss(model, batch)
    return ragtag.Loss(total, count, metrics={"count": float(count)})


def train(make, make_optimizer, settings, scheduled=False, precision="fp32"):
    model = make()
    trainer = staged(
        model,
        make_optimizer(model),
        loss_fn,
        Tokens(),
        settings,
        batch=BATCH,
        scheduler=decay if scheduled else None,
        precision=precision,
    )
    losses = [report.loss for report in trainer.steps(STEPS)]
    score = trainer.evaluate(Tokens(count=31), loss_fn)
    found = whole(trainer)
    held = sum(p.nbytes for p in model.parameters() if not p.isnan().any())
    trainer.close()
    return found, losses, (float(score), dict(score.metrics)), held


@pytest.mark.parametrize(
    ("make", "make_optimizer", "settings"),
    [
        (tied, adam, {}),
        (frozen, sgd, {}),
        (tiny, groups, {"recompute": True}),
        (recomputing, adam, {}),
        (passing, adam, {"blocks": layers_of}),
        (functional, adam, {}),
        (sequential, adam, {}),
        (skipping, adam, {"blocks": layers_of, "stages": "0:0-2, 1:2-3"}),
    ],
    ids=[
        "tied",
        "frozen",
        "groups-recompute",
        "checkpoint",
        "masks",
        "functional",
        "sequential",
        "skipping",
    ],
)
def test_a_model_of_every_kind_trains_as_in_one_process(make, make_optimizer, settings):
    settings = {"micro_batch": 5, **settings}
    results = run_ranks(2, train, make, make_optimizer, settings, True)
    model = make()
    plain_run(
        model,
        optimizer := make_optimizer(model),
        sum_loss,
        Tokens(),
        steps=STEPS,
        batch=BATCH,
        scheduler=decay(optimizer),
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][0][name], parameter.detach(), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        rows = [Tokens(count=31)[index] for index in range(31)]
        total, count = sum_loss(model, tuple(map(torch.stack, zip(*rows))))
    for _, losses, (score, metrics), _ in results:
        assert losses == results[0][1]
        assert score == pytest.approx(float(total) / count, rel=1e-12)
        assert metrics["count"] == pytest.approx(1.0)


def test_a_run_with_listed_blocks_writes_its_log(tmp_path):
    settings = {"micro_batch": 4, "blocks": layers_of, "log": str(tmp_path / "log.jsonl")}
    run_ranks(2, train, passing, adam, settings)
    steps = [event for event in read(tmp_path / "log.jsonl") if isinstance(event, Step)]
    assert [step.number for step in steps] == list(range(1, STEPS + 1))


def test_each_rank_holds_its_stage_only():
    results = run_ranks(3, train, tiny, adam, {"micro_batch": 4, "stages": "0:0-1, 1:1-2, 2:2-3"})
    all_bytes = sum(parameter.nbytes for parameter in tiny().parameters())
    assert sum(held for *_, held in results) == all_bytes
    assert max(held for *_, held in results) < 0.5 * all_bytes


def tiny_32():
    return tiny(torch.float32)


def train_whole(precision):
    model = tiny_32()
    trainer = ragtag.Trainer(model, adam(model), loss_fn, Tokens(), global_batch_size=BATCH, precision=precision)
    losses = [report.loss for report in trainer.steps(STEPS)]
    trainer.close()
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(precision):
    reference = run_ranks(1, train_whole, precision)[0]
    results = run_ranks(2, train, tiny_32, adam, {"micro_batch": 4}, False, precision)
    assert results[0][1] == pytest.approx(reference, rel=2e-2)
