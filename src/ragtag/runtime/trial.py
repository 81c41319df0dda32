"""Before step 1, find out what kind of model and loss this is, by trying it on four samples.

Three questions, each answered by an experiment instead of by guessing from class names: does the loss of 4 samples
agree with that of 2 + 2 (else a plain mean would be averaged wrongly, silently); does forward draw random numbers;
which buffers does it change. The answers say whether any split gives the same gradient (*separable*) or the step must
be cut into fixed units.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ragtag.core.errors import LossError, ModelError
from ragtag.runtime.batches import size_of, to_device
from ragtag.runtime.loss import Loss, as_loss, number_of, require_gradient
from ragtag.runtime.modes import mode
from ragtag.runtime.names import buffer_owners, named_buffers
from ragtag.runtime.precision import autocast
from ragtag.runtime.random_watch import RandomWatch
from ragtag.runtime.randomness import preserved_random_state

LossFunction = Callable[[torch.nn.Module, Any], Any]
CANDIDATES = 16


class Nature(msgspec.Struct, frozen=True, kw_only=True):
    """What the trial found."""

    draws_random_numbers: bool = False
    changed_buffers: tuple[str, ...] = ()
    batch_norm: bool = False
    metric_names: tuple[str, ...] = ()

    @property
    def separable(self) -> bool:
        """Whether any split of a batch gives the same sum of gradients."""
        return not self.draws_random_numbers and not self.changed_buffers

    @property
    def reason(self) -> str:
        """Why the run is separable or not, for people."""
        if self.separable:
            return "separable: forward draws no random numbers and changes no buffers"
        causes = []
        if self.draws_random_numbers:
            causes.append("forward draws random numbers (dropout)")
        if self.changed_buffers:
            causes.append(f"forward changes buffers ({', '.join(self.changed_buffers[:2])}...)")
        return f"non-separable: {' and '.join(causes)}"


def choose_samples(samples: Sequence[Any]) -> list[Any]:
    """Of the candidates, the two smallest, then the two largest: a token mean shows where sizes are unequal."""
    ordered = sorted(samples, key=size_of)
    return ordered if len(ordered) <= 4 else [*ordered[:2], *ordered[-2:]]


def try_loss(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    samples: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    device: torch.device,
    *,
    by_unit: bool,
    check_loss: bool,
    precision: str = "fp32",
    state_modules: Sequence[Any] = (),
) -> Nature:
    """Run the trial; the model, its buffers and all random states are as before afterwards.

    Args:
        samples: at most four, see `choose_samples`.
        by_unit: the user has set `unit`, so losses that compare samples within a batch are fine.
        check_loss: compare 4 against 2 + 2 at all.
        precision: what a step computes in.
        state_modules: objects registered in `state`; buffers of modules among them may change in forward.

    Raises:
        LossError: not a scalar, no gradient, or the plain-mean trap.
        ModelError: forward changes buffers that ragtag cannot merge.
    """

    def loss_of(part: Sequence[Any], precision: str = precision) -> Loss:
        with autocast(precision, device):
            result = loss_fn(model, to_device(collate(list(part)), device))
            return as_loss(result, num_samples=len(part))

    buffers = {name: buffer.detach().clone() for name, buffer in named_buffers(model)}
    compiled_eagerly = torch.compiler.set_stance("force_eager")
    with preserved_random_state(device), compiled_eagerly:
        try:
            watch = RandomWatch(device)
            with torch.enable_grad():
                trained = loss_of(samples)
            require_gradient(trained)
            drew = watch.drew()
            changed = [name for name, buffer in named_buffers(model) if not _same(buffer, buffers[name])]
            if check_loss and not by_unit and len(samples) >= 2:
                with mode(model, training=False), torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the missing gradients, from checkpointing
                    _check_additive(loss_of, samples, precision, _smallest_dtype(model), device)
        finally:
            for name, buffer in named_buffers(model):
                buffer.detach().copy_(buffers[name])
    batch_norm = _check_buffers(model, changed, state_modules)
    return Nature(
        draws_random_numbers=drew,
        changed_buffers=tuple(changed),
        batch_norm=batch_norm,
        metric_names=tuple(sorted(trained.metrics)),
    )


def compute_round(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    samples: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    device: torch.device,
    precision: str,
) -> None:
    """One forward and backward as in a step; the model, its buffers and all random states are as before afterwards.

    Gradients are left to whoever listens.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in named_buffers(model)}
    with preserved_random_state(device), torch.compiler.set_stance("force_eager"):
        try:
            with torch.enable_grad():
                with autocast(precision, device):
                    loss = as_loss(loss_fn(model, to_device(collate(list(samples)), device)), num_samples=len(samples))
                require_gradient(loss)
                loss.total.backward()
        finally:
            for name, buffer in named_buffers(model):
                buffer.detach().copy_(buffers[name])


def _same(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether nothing was written; a NaN that stayed a NaN was not."""
    return torch.equal(buffer, before) or (
        buffer.is_floating_point()
        and torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(before))
        and torch.equal(buffer.isnan(), before.isnan())
    )


def _smallest_dtype(model: torch.nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _check_additive(
    loss_of: Callable[..., Loss], samples: Sequence[Any], precision: str, dtype: torch.dtype, device: torch.device
) -> None:
    half = len(samples) // 2
    parts_of_it = (samples, samples[:half], samples[half:])
    watch = RandomWatch(device)
    try:  # token means differ little in a new model: rounding to fewer digits would hide them
        whole, first, second = (loss_of(part, "fp32") for part in parts_of_it)
    except RuntimeError:
        if precision == "fp32":
            raise
        whole, first, second = (loss_of(part) for part in parts_of_it)
    else:
        precision = "fp32"
    if precision != "fp32":
        dtype = torch.bfloat16
    elif whole.total.dtype.itemsize < dtype.itemsize:
        dtype = whole.total.dtype
    if watch.drew():  # random in evaluation mode too, or in collate_fn: nothing can be told from comparing
        return
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 2e-2)
    total, parts = number_of(whole.total), number_of(first.total) + number_of(second.total)
    counts = number_of(first.count) + number_of(second.count)
    scale = max(abs(total), abs(number_of(first.total)), abs(number_of(second.total)), 1e-30)
    agree = abs(total - parts) <= tolerance * scale and abs(number_of(whole.count) - counts) <= 1e-6 * max(counts, 1.0)
    if agree or total != total or parts != parts:  # a NaN loss is the step's business, and named there
        return
    n = len(samples)
    raise LossError(
        f"the loss of {n} samples ({total / n:.6g} a sample) is not that of the same samples as {half} + {n - half} "
        f"({parts / n:.6g}), so averaging over unequal pieces would be silently wrong. Either it is a mean over tokens "
        f"(pixels, boxes, ...): return the sum and its count instead,\n"
        f"    return ragtag.Loss(losses.sum(), num_tokens)    or    ragtag.Loss.from_mean(output.loss, num_tokens)\n"
        f"or it compares the samples of a batch with one another (contrastive): fix the piece it is computed on with\n"
        f"    ragtag.Trainer(..., config=ragtag.Config(unit=32))"
    )


def _check_buffers(model: torch.nn.Module, changed: Sequence[str], state_modules: Sequence[Any]) -> bool:
    """Refuse changed buffers that are neither BatchNorm's nor registered; returns whether BatchNorm's are among
    them."""
    owners = {name: module for name, (module, _) in buffer_owners(model).items()}
    registered = {id(m) for item in state_modules if isinstance(item, torch.nn.Module) for m in item.modules()}
    norm = torch.nn.modules.batchnorm._NormBase
    refused = [name for name in changed if not isinstance(owners[name], norm) and id(owners[name]) not in registered]
    if refused:
        names = ", ".join(f"'{name}'" for name in refused[:5])
        raise ModelError(
            f"forward changes the buffer(s) {names}, which are not BatchNorm statistics. If merging "
            f"them by sample count "
            f"over units is right, register the module that owns them: "
            f"Trainer(..., state={{'{refused[0].rpartition('.')[0] or 'model'}': that_module}})."
        )
    return any(isinstance(owners[name], norm) for name in changed)
