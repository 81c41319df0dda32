"""Memory that runs out while state is in slices: all ranks do the step again, and nothing of it is lost."""

import os

import pytest
import torch

import ragtag
from ragtag.core.errors import DeviceMemoryError
from tests.ranks import run_ranks
from tests.runtime.reference import plain_run
from tests.zero.models import Tokens, sum_loss, tiny
from tests.zero.test_zero_exact import adam, expected, loss_fn

LAYOUTS = ["zero1", "zero2", "zero3"]


class Fails(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        raise torch.OutOfMemoryError("out of memory in backward")


def train(layout, where, limit, steps, shares):
    torch.set_num_threads(1)
    model, done, failed = tiny(), [0], []

    def scarce(model, batch):
        if trainer is not None and trainer.rank == 1 and done[0] >= 2 and len(batch[0]) > limit:
            failed.append(len(batch[0]))
            if where == "forward":
                model.blocks[0](model.embed(batch[0]))
                raise torch.OutOfMemoryError("out of memory in forward")
            hook = model.blocks[1].register_forward_hook(lambda *arguments: Fails.apply(arguments[2]))
            try:
                return loss_fn(model, batch)
            finally:
                hook.remove()
        return loss_fn(model, batch)

    trainer = None
    trainer = ragtag.Trainer(
        model,
        adam(model.parameters()),
        scarce,
        Tokens(),
        global_batch_size=12,
        shares=shares,
        clip_norm=1.0,
        config=ragtag.Config(layout=layout, slices=(5, 1, 3)),
    )
    for report in trainer.steps(steps):
        done[0] = report.number
    whole = trainer._run.sharding.parameters()
    plan = trainer.plan
    trainer.close()
    return {name: p.detach().clone() for name, p in whole.items()}, plan.micro_batch, failed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_runs_out_and_the_step_is_done_again(layout, where):
    results = run_ranks(3, train, layout, where, 2, 6, (3, 8, 1))
    reference = expected({}, steps=6)
    for name, parameter in reference.items():
        assert (results[0][0][name] - parameter.detach()).abs().max() < 1e-10, name
    assert {micro_batch for _, micro_batch, _ in results} == {(3, 2, 1)}
    assert results[1][2], "it did run out"
    assert not results[0][2]


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_a_rank_without_room_for_a_sample_leaves_its_work_to_others(layout):
    results = run_ranks(3, train, layout, "forward", 0, 5, (3, 8, 1))
    reference = expected({}, steps=5)
    for name, parameter in reference.items():
        assert (results[2][0] or results[0][0])[name].sub(parameter.detach()).abs().max() < 1e-10, name


def train_everywhere_short(layout):
    model, done = tiny(), [0]

    def scarce(model, batch):
        if done[0] >= 1:
            raise torch.OutOfMemoryError("out of memory")
        return loss_fn(model, batch)

    trainer = ragtag.Trainer(
        model, adam(model.parameters()), scarce, Tokens(), global_batch_size=12, config=ragtag.Config(layout=layout)
    )
    for report in trainer.steps(3):
        done[0] = report.number


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_where_no_rank_has_room_all_end_with_one_error(layout):
    results = run_ranks(2, train_everywhere_short, layout, expect_failures=True)
    assert all(isinstance(each, DeviceMemoryError) for each in results), results
    assert len({str(each) for each in results}) == 1


def train_capped(cluster):
    torch.set_num_threads(1)
    os.environ["RAGTAG_EMULATE"] = cluster
    model = tiny(depth=12, width=16)
    trainer = ragtag.Trainer(
        model,
        adam(model.parameters()),
        loss_fn,
        Tokens(),
        global_batch_size=12,
        config=ragtag.Config(micro_batch=1),
    )
    memory, plan = trainer._run.memory, trainer.plan
    list(trainer.steps(3))
    whole = trainer._run.sharding.parameters()
    result = {name: p.detach().clone() for name, p in whole.items()}, memory.peak_bytes, plan  # pyright: ignore[reportAttributeAccessIssue]
    trainer.close()
    return result


def test_slices_follow_the_memory_of_emulated_devices(tmp_path):
    """A whole replica takes 0.55 MB; devices of 400, 280 and 160 kB hold it together, and the first one computes."""
    caps = (400, 280, 160)
    devices = "".join(f'[[device]]\nname = "dev{rank}"\nmemory = "{cap} kB"\n' for rank, cap in enumerate(caps))
    (tmp_path / "home.toml").write_text(devices)
    results = run_ranks(3, train_capped, str(tmp_path / "home.toml"))
    model = tiny(depth=12, width=16)
    plain_run(model, adam(model.parameters()), sum_loss, Tokens(), steps=3, batch=12)
    for name, parameter in model.named_parameters():
        assert (results[0][0][name] - parameter.detach()).abs().max() < 1e-10, name
    plan = results[0][2]
    assert plan.layout == "zero3"
    assert "a whole replica takes" in plan.reason
    assert plan.slices[0] > plan.slices[1] > plan.slices[2] > 0
    for (_, peak, _), cap in zip(results, caps):
        assert peak <= 1e3 * cap
