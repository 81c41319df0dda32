"""What a loss function may return, and that a step asks the device for numbers once."""

import math
from dataclasses import dataclass

import numpy
import pytest
import torch
from tests.runtime import cases
from torch.overrides import TorchFunctionMode

import ragtag
from ragtag.runtime.loss import as_loss, as_metric
from ragtag.runtime.loss_sums import LossSums

MEAN = torch.tensor(2.0, requires_grad=True)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0), numpy.int64(0)], ids=repr)
def test_a_mean_over_nothing_is_a_sum_of_zero_without_a_gradient(count):
    weight = torch.ones(3, requires_grad=True)
    mean = (weight * torch.zeros(3)).sum() / 0  # NaN, and so would be its gradient
    loss = ragtag.Loss.from_mean(mean, count)
    assert float(loss.total) == 0.0
    assert not loss.total.requires_grad
    assert as_loss(loss, num_samples=3) is loss


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), numpy.int64(3), numpy.float32(3)], ids=repr)
def test_a_mean_becomes_a_sum_again(count):
    loss = ragtag.Loss.from_mean(MEAN, count, {"right": 2})
    (gradient,) = torch.autograd.grad(loss.total, MEAN)
    assert (float(loss.total.detach()), float(gradient), loss.metrics) == (6.0, 3.0, {"right": 2})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_means_are_made_in_fp32(dtype):
    mean = torch.tensor(1.0, dtype=dtype)
    for loss in (as_loss(mean, num_samples=301), ragtag.Loss.from_mean(mean, 70001)):
        assert loss.total.dtype == torch.float32
    assert float(as_loss(mean, num_samples=301).total) == 301.0  # bf16 has no such number
    assert math.isfinite(float(ragtag.Loss.from_mean(mean, 70001).total))  # nor has fp16


@dataclass
class ModelOutput:
    loss: torch.Tensor


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (ModelOutput(MEAN), r"a ModelOutput with a \.loss.*ragtag\.Loss\.from_mean\(output\.loss, count\)"),
        ((MEAN, 3), "a tuple of 2. Return the loss alone"),
        (None, "returned None"),
        (2.0, r"a float \(2\.0\)"),
        (torch.zeros(1), r"shape \(1,\); expected a scalar"),
        (torch.tensor(3), r"dtype torch\.int64; expected a floating-point"),
        (ragtag.Loss(torch.tensor(1.0), torch.ones(2)), r"count has shape \(2,\)"),
        (ragtag.Loss(torch.tensor(1.0), True), "count is a bool"),
        (ragtag.Loss(torch.tensor(1.0), math.nan), "count is nan; expected a finite"),
        (ragtag.Loss(torch.tensor(1.0), 2, {"f1": "high"}), "metric 'f1' is a str"),
        (ragtag.Loss(1.0, 2), "total is a float"),  # type: ignore[arg-type]
    ],
)
def test_everything_else_is_refused_with_the_way_out(result, message):
    with pytest.raises(ragtag.LossError, match=message):
        as_loss(result, num_samples=3)


def test_a_metric_may_be_a_plain_number():
    assert float(as_metric(0.1, num_samples=3).total) == pytest.approx(0.3, abs=1e-15)
    with pytest.raises(ragtag.LossError, match="metric_fn returned a bool"):
        as_metric(True, num_samples=3)


def test_sums_mix_numbers_and_tensors():
    sums = LossSums(("right",), torch.device("cpu"))
    sums.add(ragtag.Loss(torch.tensor(1.5), 2, {"right": torch.tensor(1)}), (0, 1))
    sums.add(ragtag.Loss(torch.tensor(0.25, dtype=torch.bfloat16), torch.tensor(3), {"right": 2.0}), (2,))
    sums.add(ragtag.Loss(torch.tensor(math.inf), 1, {"right": 0}), (3, 4))
    assert sums.numbers(torch.tensor(7.0), 0.1) == ([math.inf, 6.0, 3.0], [7.0, 0.1])
    assert sums.non_finite_units() == [(3, 4)]


# ---- one host synchronisation a step

READING = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "is_nonzero", "equal",
           "allclose", "nonzero", "unique"}  # fmt: skip


class Readings(TorchFunctionMode):
    """Writes down every call that makes the host wait for values of a device: the CPU stands in for one.

    States of random generators are bytes in host memory on any device.
    """

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        moved = name == "to" and any(str(a) == "cpu" for a in (*args[1:], *(kwargs or {}).values()) if a is not args[0])
        of_bytes = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.uint8
        if (name in READING or (moved and "cpu" not in str(args[0].device))) and not of_bytes:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def readings(loss_fn, *, tokens=False, steps=2, **options):
    model = cases.tagger() if tokens else cases.mlp()
    options.setdefault("config", ragtag.Config(micro_batch=3, bucket_bytes=1024))
    trainer = ragtag.Trainer(
        model,
        cases.sgd(model, lr=options.pop("lr", 0.05)),
        loss_fn,
        cases.Sentences() if tokens else cases.regression(),
        global_batch_size=10,
        loader={"collate_fn": cases.pad} if tokens else {},
        **options,
    )
    list(trainer.steps(1))
    with Readings() as seen:
        list(trainer.steps(steps))
    trainer.close()
    return seen.names


def with_dropout(model, batch):
    return cases.mean_squares(model, (torch.nn.functional.dropout(batch[0], 0.1), batch[1]))


@pytest.mark.parametrize(
    "how",
    [
        {"loss_fn": cases.mean_squares},
        {"loss_fn": cases.mean_squares, "clip_norm": 0.1},
        {"loss_fn": cases.mean_squares, "precision": "fp16"},
        {"loss_fn": cases.mean_squares, "lr": torch.tensor(0.05)},
        {"loss_fn": cases.mean_squares, "config": ragtag.Config(unit=4)},
        {"loss_fn": with_dropout},
        {"loss_fn": cases.token_loss, "tokens": True},
    ],
    ids=["mean", "clipped", "fp16", "lr in a tensor", "by unit", "dropout", "Loss with a tensor count"],
)
def test_a_step_reads_the_device_once(how):
    names = readings(**how)
    if isinstance(how.get("lr"), torch.Tensor):
        names = [name for name in names if name != "item"]  # the optimizer's own, which foreach on a CPU asks for
    assert names == ["tolist", "tolist"]


def test_a_loss_function_that_reads_would_be_seen():
    def reading(model, batch):
        loss = cases.mean_squares(model, batch)
        loss.item()
        return loss

    assert readings(reading, steps=1) == ["item"] * 4 + ["tolist"]
