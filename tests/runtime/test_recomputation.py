"""Activations that are computed again, on ranks that have no room for them."""

import os

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import cases
from tests.runtime.reference import plain_run

import ragtag


def deep():
    torch.manual_seed(4)
    layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)) for _ in range(8)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(6, 2)).double()


def data():
    generator = torch.Generator().manual_seed(6)
    return torch.utils.data.TensorDataset(
        torch.randn(40, 30, 6, dtype=torch.float64, generator=generator),
        torch.randn(40, 30, 2, dtype=torch.float64, generator=generator),
    )


def sum_squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), y.numel()


def loss_fn(model, batch):
    return ragtag.Loss(*sum_squares(model, batch))


def train(cluster, settings):
    torch.set_num_threads(1)
    os.environ["RAGTAG_EMULATE"] = cluster
    model = deep()
    trainer = ragtag.Trainer(
        model,
        cases.adam(model),
        loss_fn,
        data(),
        global_batch_size=12,
        shares=(6, 6),
        config=ragtag.Config(**settings),
    )
    list(trainer.steps(5))
    recomputes, shares = trainer._run.recomputation.active, trainer.plan.shares
    sharding = trainer._run.sharding
    values = cases.values(model) if sharding is None else sharding.parameters()
    trainer.close()
    return values, recomputes, shares


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
def test_a_rank_without_room_for_one_sample_computes_again_before_others_do_its_work(tmp_path, layout):
    """A sample's activations take 25 kB, 13 kB where only what goes into blocks is kept; a whole replica 22 kB."""
    memory = "40 kB" if layout == "replicated" else "24 kB"
    (tmp_path / "home.toml").write_text(f'[[device]]\nname = "box"\n[[device]]\nname = "laptop"\nmemory = "{memory}"\n')
    results = run_ranks(2, train, str(tmp_path / "home.toml"), {"layout": layout})
    model = deep()
    plain_run(model, cases.adam(model), sum_squares, data(), steps=5, batch=12)
    for name, value in dict(model.named_parameters()).items():
        assert (results[0][0][name] - value.detach()).abs().max() < 1e-10, name
    assert [recomputes for _, recomputes, _ in results] == [False, True]
    assert results[1][2][1] > 0, "it has work"


def train_alone(recompute):
    torch.set_num_threads(1)
    model = deep()
    saved = []
    trainer = ragtag.Trainer(
        model, cases.adam(model), loss_fn, data(), global_batch_size=12, config=ragtag.Config(recompute=recompute)
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes) or tensor, lambda t: t):
        losses = [report.loss for report in trainer.steps(3)]
    trainer.close()
    return losses, sum(saved)


def test_what_is_computed_again_is_the_same():
    kept, kept_bytes = train_alone(False)
    again, again_bytes = train_alone(True)
    assert again == kept
    assert again_bytes < kept_bytes


def test_a_model_without_blocks_is_refused_by_name():
    model = torch.nn.Linear(6, 2)
    with pytest.raises(ragtag.SettingError, match=r"recompute=True, but .*blocks"):
        ragtag.Trainer(
            model,
            cases.adam(model),
            cases.mean_squares,
            cases.regression(),
            global_batch_size=8,
            config=ragtag.Config(recompute=True),
        )
