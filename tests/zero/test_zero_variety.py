"""Models, optimizers and losses of many kinds, their state in slices: each against a plain loop."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ragtag
from tests.ranks import run_ranks
from tests.runtime.reference import plain_run, plain_unit_run
from tests.zero.models import Tiny, Tokens, sum_loss, tiny

LAYOUTS = ["zero1", "zero2", "zero3"]
BATCH = 12


def tied():
    return tiny(tied=True)


def unused():
    return tiny(unused=True)


def frozen():
    model = tiny()
    for parameter in [
        *model.embed.parameters(),
        *model.blocks[0].parameters(),
        model.get_parameter("blocks.1.up.weight"),
    ]:
        parameter.requires_grad_(False)
    return model


def shared():
    """The same block three times."""
    model = tiny(depth=1)
    model.blocks = nn.ModuleList([model.blocks[0], Tiny(depth=1).double().blocks[0], model.blocks[0]])
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


class Recomputing(Tiny):
    """Each block's activations are computed again in backward."""

    reentrant = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputingReentrant(Recomputing):
    reentrant = True


def recomputing():
    torch.manual_seed(3)
    return Recomputing().double()


def recomputing_reentrant():
    torch.manual_seed(3)
    return RecomputingReentrant().double()


class Skipping(Tiny):
    """The last block's result is used in some micro-batches only, and its gradients come with it."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        extra = self.blocks[-1](x)
        if len(tokens) > 2 or int(tokens[:, 0].sum()) % 2 == 0:
            x = x + extra
        return self.head(x)


def skipping():
    torch.manual_seed(3)
    return Skipping().double()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def groups(model):
    norms = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    rest = [p for name, p in model.named_parameters() if not ("norm" in name or "bias" in name)]
    return torch.optim.Adam(
        [{"params": norms, "lr": 1e-3}, {"params": rest, "weight_decay": 0.01}], lr=3e-3, amsgrad=True, foreach=False
    )


def loss_fn(model, batch):
    total, count = sum_loss(model, batch)
    return ragtag.Loss(total, count)


def decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def train(make, make_optimizer, layout, steps, settings, shares, scheduled):
    torch.set_num_threads(1)
    model = make()
    trainer = ragtag.Trainer(
        model,
        make_optimizer(model),
        loss_fn,
        Tokens(),
        global_batch_size=BATCH,
        shares=shares,
        scheduler=decay if scheduled else None,
        config=ragtag.Config(layout=layout, slices=(5, 3, 1), **settings),
    )
    for _ in trainer.steps(steps):
        pass
    whole = trainer._run.sharding.parameters()
    trainer.close()
    return {name: p.detach().clone() for name, p in whole.items()}


KINDS = [
    (tied, adam),
    (unused, adam),
    (frozen, sgd),
    (shared, adam),
    (recomputing, adam),
    (recomputing_reentrant, sgd),
    (tiny, groups),
]
QUICK = [unused, frozen, tiny]
"""Those that differ under layouts that leave parameters whole."""


@pytest.mark.parametrize(
    ("make", "make_optimizer", "layout"),
    [
        pytest.param(*kind, layout, marks=[] if layout == "zero3" or kind[0] in QUICK else [pytest.mark.long])
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_trains_as_one_process(make, make_optimizer, layout):
    settings = {"micro_batch": 4}
    results = run_ranks(3, train, make, make_optimizer, layout, 8, settings, (7, 1, 4), True)
    model = make()
    optimizer = make_optimizer(model)
    plain_run(model, optimizer, sum_loss, Tokens(), steps=8, batch=BATCH, scheduler=decay(optimizer))
    assert_equal(results[0], model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_come_now_and_then(layout):
    results = run_ranks(3, train, skipping, sgd, layout, 8, {"unit": 2}, (6, 2, 4), False)
    model = skipping()
    plain_unit_run(model, sgd(model), sum_loss, Tokens(), steps=8, batch=BATCH, unit=2)
    assert_equal(results[0], model)


def assert_equal(whole, model):
    reference = dict(model.named_parameters())
    assert set(whole) == set(reference)
    for name, parameter in reference.items():
        worst = (whole[name] - parameter.detach()).abs().max().item()
        assert worst < 1e-10, f"{name} differs by {worst}"


class Noisy(nn.Module):
    """Convolutions with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[
                nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2))
                for _ in range(3)
            ]
        )
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.layers(x).mean(dim=2))


def noisy():
    torch.manual_seed(4)
    return Noisy().double()


def waves():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 4, 9, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(x, x.mean(dim=(1, 2))[:, None])


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def mean_squares(model, batch):
    total, count = squares(model, batch)
    return total / count


def train_noisy(layout):
    torch.set_num_threads(1)
    model = noisy()
    trainer = ragtag.Trainer(
        model,
        adam(model),
        mean_squares,
        waves(),
        global_batch_size=16,
        shares=(8, 4, 4),
        config=ragtag.Config(layout=layout, slices=(1, 0, 2), unit=4),
    )
    for _ in trainer.steps(6):
        pass
    whole = trainer._run.sharding.parameters()
    value = float(trainer.evaluate(waves(), mean_squares))
    trainer.close()
    return {**whole, **{name: b.clone() for name, b in model.named_buffers()}}, value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_and_batch_norm_by_unit(layout):
    results = run_ranks(3, train_noisy, layout)
    model = noisy()
    plain_unit_run(model, adam(model), squares, waves(), steps=6, batch=16, unit=4)
    reference = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in reference.items():
        torch.testing.assert_close(results[0][0][name], value.detach(), rtol=1e-10, atol=1e-10)
    model.eval()
    with torch.no_grad():
        expected = float(mean_squares(model, next(iter(torch.utils.data.DataLoader(waves(), batch_size=40)))))
    for _, value in results:
        assert value == pytest.approx(expected, rel=1e-12)


def train_in(precision, layout):
    torch.set_num_threads(1)
    model = tiny(torch.float32)
    trainer = ragtag.Trainer(
        model,
        sgd(model),
        loss_fn,
        Tokens(),
        global_batch_size=BATCH,
        shares=(7, 1, 4),
        precision=precision,
        config=ragtag.Config(layout=layout, slices=None if layout == "replicated" else (5, 3, 1), micro_batch=4),
    )
    skipped = [report.skipped for report in trainer.steps(6)]
    sharding = trainer._run.sharding
    whole = dict(model.named_parameters()) if sharding is None else sharding.parameters()
    value = float(trainer.evaluate(Tokens(), loss_fn))
    trainer.close()
    return {name: p.detach().clone() for name, p in whole.items()}, skipped, value


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_whole_replicas(precision):
    reference, skipped, value = run_ranks(3, train_in, precision, "replicated")[0]
    for layout in LAYOUTS:
        mine, skipped_too, value_too = run_ranks(3, train_in, precision, layout)[0]
        assert skipped_too == skipped
        assert value_too == pytest.approx(value, rel=1e-5)
        for name, expected in reference.items():
            worst = (mine[name] - expected).abs().max().item()
            assert worst < 1e-5, f"{layout}: {name} differs by {worst}"


def half():
    return tiny(torch.bfloat16)


def train_half(layout):
    torch.set_num_threads(1)
    model = half()
    trainer = ragtag.Trainer(
        model,
        adam(model),
        loss_fn,
        Tokens(),
        global_batch_size=BATCH,
        shares=(4, 4, 4),
        config=ragtag.Config(layout=layout, check_loss=False),
    )
    losses = [report.loss for report in trainer.steps(5)]
    trainer.close()
    return losses


def test_half_precision_models():
    expected = run_ranks(3, train_half, "replicated")[0]
    for layout in LAYOUTS:
        assert run_ranks(3, train_half, layout)[0] == pytest.approx(expected, rel=1e-2)


def refused(layout, make_optimizer_name, with_average):
    model = tiny()
    averages = {"ema": torch.optim.swa_utils.AveragedModel(model)} if with_average else {}
    optimizer = getattr(torch.optim, make_optimizer_name)(model.parameters())
    ragtag.Trainer(
        model, optimizer, loss_fn, Tokens(), global_batch_size=12, state=averages, config=ragtag.Config(layout=layout)
    )


@pytest.mark.parametrize(
    ("layout", "optimizer", "with_average", "said"),
    [
        ("zero1", "Adafactor", False, "Adafactor computes with whole matrices"),
        ("zero3", "AdamW", True, "holds parameters of its own"),
    ],
)
def test_what_slices_cannot_do_is_refused_by_name(layout, optimizer, with_average, said):
    for error in run_ranks(2, refused, layout, optimizer, with_average, expect_failures=True):
        assert said in str(error)


def read_state_dict():
    model = tiny()
    trainer = ragtag.Trainer(
        model, adam(model), loss_fn, Tokens(), global_batch_size=12, config=ragtag.Config(layout="zero3")
    )
    list(trainer.steps(1))
    try:
        model.state_dict()
    except ragtag.RagtagError as error:
        said = str(error)
    logits = model(Tokens()[0][0][None])  # every rank does
    trainer.close()
    return said, bool(torch.isfinite(logits).all())


def test_between_steps_the_model_can_be_called_but_not_read():
    for said, finite in run_ranks(2, read_state_dict):
        assert "trainer.save" in said
        assert finite
