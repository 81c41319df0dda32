"""What a `loss_fn` may return, brought to one form: a sum, and what it sums over.

A mean cannot be added up over unequal pieces; a sum can. Every micro-batch therefore contributes the *sum* of its
losses, and the division by the true total weight happens once, after the reduction.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragtag.core.errors import LossError

Number = torch.Tensor | float | int


class Loss:
    """A loss as a sum and the count it sums over, for weighting by tokens, pixels, boxes or anything else.

    Args:
        total: scalar tensor, the *sum* of the loss over this batch's items.
        count: how many items `total` sums over (number or scalar tensor); 0 is fine.
        metrics: further sums over the same items, reported as metric / count (number or scalar tensor each).

    Over all ranks and micro-batches of a step the gradient is d(sum of totals) / (sum of counts).
    """

    __slots__ = ("count", "metrics", "total")

    def __init__(self, total: torch.Tensor, count: Number, metrics: Mapping[str, Number] | None = None) -> None:
        self.total = total
        self.count = count
        self.metrics = dict(metrics or {})

    @classmethod
    def from_mean(cls, mean: torch.Tensor, count: Number, metrics: Mapping[str, Number] | None = None) -> "Loss":
        """Turn a model's own mean over `count` items back into a sum: `Loss.from_mean(output.loss, num_labels)`.

        A mean over zero items is NaN (0 / 0); it becomes a sum of zero without a gradient. `metrics` are sums. Where
        `count` is on an accelerator it is not waited for, and a mean that was divided by zero in the model may still
        send NaN backwards: give `Loss` the sum itself there, or a count from the host.
        """
        mean = _at_least_fp32(mean)
        if isinstance(count, torch.Tensor):
            if count.device.type == "cpu":
                count = count.item()
            else:  # no synchronisation: the empty case is masked on the device
                return cls(torch.where(count > 0, mean * count, torch.zeros_like(mean)), count, metrics)
        total = mean * count if count > 0 else torch.zeros_like(mean)
        return cls(total, count, metrics)

    def __repr__(self) -> str:
        return f"Loss(total={self.total}, count={self.count}, metrics={self.metrics})"


def as_loss(result: Any, *, num_samples: int, function: str = "loss_fn") -> Loss:
    """Bring what `function` returned to a `Loss`; a plain scalar tensor is a mean over `num_samples` samples.

    Raises:
        LossError: not a scalar, not a tensor, no gradient, or metrics that are no scalars.
    """
    if isinstance(result, Loss):
        _check_scalar(result.total, f"{function} returned ragtag.Loss whose total")
        _check_number(result.count, f"{function} returned ragtag.Loss whose count")
        for name, value in result.metrics.items():
            _check_number(value, f"{function} returned ragtag.Loss whose metric {name!r}")
        return result
    if isinstance(result, torch.Tensor):
        _check_scalar(result, f"{function} returned a tensor that")
        return Loss(_at_least_fp32(result) * num_samples, num_samples)
    if isinstance(getattr(result, "loss", None), torch.Tensor):
        raise LossError(
            f"{function} returned a {type(result).__name__} with a .loss. Whether that is a mean over samples or over "
            f"tokens only you know: return output.loss for a mean over samples, or "
            f"ragtag.Loss.from_mean(output.loss, count) with the number of items the model averaged over."
        )
    if isinstance(result, tuple | list):
        raise LossError(
            f"{function} returned a {type(result).__name__} of {len(result)}. Return the loss alone, or "
            f"ragtag.Loss(total, count, metrics={{...}}) to report more."
        )
    raise LossError(
        f"{function} returned {_describe(result)}; expected a scalar tensor (a mean over the batch's samples) or "
        f"ragtag.Loss(total, count)."
    )


def as_metric(result: Any, *, num_samples: int) -> Loss:
    """Like `as_loss` for a `metric_fn`, where a plain number also means a mean over the batch's samples."""
    if isinstance(result, float | int) and not isinstance(result, bool):
        result = torch.tensor(float(result), dtype=torch.float64)
    return as_loss(result, num_samples=num_samples, function="metric_fn")


def require_gradient(loss: Loss) -> None:
    """Raise LossError if a loss over some items carries no gradient (and only then read the count)."""
    if not loss.total.requires_grad and number_of(loss.count) != 0:
        raise LossError(
            "loss_fn returned a loss without a gradient: it does not depend on any trainable parameter. "
            "Look for .detach(), .item() or torch.no_grad() between the model and the loss."
        )


def require_metrics(loss: Loss, names: Sequence[str], step: int) -> None:
    """Raise LossError unless a loss of step `step` has the metrics `names`, which the trial found."""
    if sorted(loss.metrics) != sorted(names):
        raise LossError(
            f"loss_fn returned the metrics {sorted(loss.metrics)} in step {step}, but "
            f"{list(names)} in the trial. Return the same names every time."
        )


def number_of(value: Number) -> float:
    """A plain float; synchronises if the value is on a device."""
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _at_least_fp32(mean: torch.Tensor) -> torch.Tensor:
    """A sum over many samples has more digits than a half-precision mean."""
    return mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean


def _check_scalar(value: Any, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise LossError(f"{what} is {_describe(value)}; expected a scalar tensor.")
    if value.numel() != 1 or value.dim() != 0:
        raise LossError(
            f"{what} has shape {tuple(value.shape)}; expected a scalar (shape ()). Reduce it: .mean() for a mean over "
            f"samples, or ragtag.Loss(value.sum(), count)."
        )
    if not value.is_floating_point():
        raise LossError(f"{what} has dtype {value.dtype}; expected a floating-point scalar.")


def _check_number(value: Any, what: str) -> None:
    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            raise LossError(f"{what} has shape {tuple(value.shape)}; expected a number or a scalar tensor.")
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise LossError(f"{what} is {_describe(value)}; expected a number or a scalar tensor.")
    elif not math.isfinite(value):
        raise LossError(f"{what} is {value}; expected a finite number.")


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({value!r:.60})"
