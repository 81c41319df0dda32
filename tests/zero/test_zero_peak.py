"""What a step holds at the most, against the plan."""

import os

import pytest
import torch

import ragtag
from ragtag.control.layout import Needs, peak_bytes
from ragtag.runtime.zero.choosing import needs_of
from tests.ranks import run_ranks
from tests.zero.models import Tokens
from tests.zero.test_zero_exact import adam, loss_fn
from tests.zero.test_zero_variety import Recomputing

CAPS_KB = (1400, 850, 560)


def train(cluster):
    torch.set_num_threads(1)
    os.environ["RAGTAG_EMULATE"] = cluster
    torch.manual_seed(3)
    model = Recomputing(depth=24, width=32)
    trainer = ragtag.Trainer(
        model, adam(model.parameters()), loss_fn, Tokens(), global_batch_size=3, config=ragtag.Config(micro_batch=1)
    )
    list(trainer.steps(3))
    run, plan = trainer._run, trainer.plan
    planned = peak_bytes(needs_of(model, run.optimizer), plan.layout, plan.slices)[trainer.rank]
    trainer.close()
    return plan.layout, run.memory.peak_bytes, planned  # pyright: ignore[reportAttributeAccessIssue]


def test_peaks_are_those_of_the_plan(tmp_path):
    devices = "".join(f'[[device]]\nname = "dev{rank}"\nmemory = "{cap} kB"\n' for rank, cap in enumerate(CAPS_KB))
    (tmp_path / "home.toml").write_text(devices)
    for (layout, peak, planned), cap in zip(run_ranks(3, train, str(tmp_path / "home.toml")), CAPS_KB):
        assert layout == "zero3"
        assert peak <= 1e3 * cap
        assert peak == pytest.approx(planned, rel=0.08)


def test_what_is_planned_to_be_held():
    needs = Needs(
        parameter_bytes=1000, gradient_bytes=1000, optimizer_bytes=2000, largest_block_bytes=90, rest_bytes=100
    )
    assert peak_bytes(needs, "zero3", (3, 1, 0)) == (3650, 1650, 650)
    assert peak_bytes(needs, "zero2", (1, 1)) == (2870, 2870)
    assert peak_bytes(needs, "replicated", ()) == ()
