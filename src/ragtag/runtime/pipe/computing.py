"""A step in a pipeline: micro-batches come from the stage before and go to the one after.

The one idea: a step is a list of turns, forwards and backwards of micro-batches; a turn takes what came, runs this
stage's part of `loss_fn(model, batch)`, and hands on what comes of it. The last stage has the loss, and in the ledger
it stands for all of them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ragtag.core.errors import ModelError
from ragtag.core.ledger import Ledger, micro_batches
from ragtag.runtime.batches import to_device
from ragtag.runtime.device import copies_asynchronously
from ragtag.runtime.loss import Loss, as_loss, require_gradient, require_metrics
from ragtag.runtime.out_of_memory import memory_explained
from ragtag.runtime.pipe.order import Turn
from ragtag.runtime.pipe.pipe import Pipe
from ragtag.runtime.pipe.traffic import Traffic
from ragtag.runtime.precision import autocast
from ragtag.runtime.run import Run
from ragtag.runtime.settling import Settling
from ragtag.runtime.work import Units

_ROOM = "Take a smaller Config(micro_batch=...), Config(recompute=True), or give this device fewer blocks: stages=..."


class _UnderWay(NamedTuple):
    """A micro-batch between its forward and its backward here."""

    received: torch.Tensor | None
    output: torch.Tensor | None
    """What was handed on, or the loss times the step's factor."""
    samples: int


def compute_stage(pipe: Pipe, settling: Settling) -> None:
    """Take this rank's turns of a step, until its sums hold its stage's gradients of all of its pipeline's samples."""
    run, ledger, number = settling.run, settling.ledger, settling.number
    run.contention.begin_work()
    work = _micro_batches(pipe, run, ledger)
    order = pipe.order(len(work))
    traffic = pipe.traffic(order, backward=True)
    under_way: dict[int, _UnderWay] = {}
    run.group.note(number, "forward and backward of its stage")
    settling.adding = True
    for turn in order:
        if turn.forward:
            under_way[turn.number] = _forward(pipe, settling, traffic, turn, work[turn.number])
        else:
            _backward(pipe, settling, traffic, turn, under_way.pop(turn.number))
            if pipe.is_last:
                ledger.record_sum(run.group.rank, work[turn.number])
    settling.adding = False
    with _waiting(run):
        traffic.finish()


def _micro_batches(pipe: Pipe, run: Run, ledger: Ledger) -> list[Units]:
    units = ledger.todo(pipe.feeding_rank)
    if run.by_unit:
        return [(unit,) for unit in units]
    return micro_batches(ledger, units, run.plan.micro_batch[pipe.feeding_rank])


def _forward(pipe: Pipe, settling: Settling, traffic: Traffic, turn: Turn, units: Units) -> _UnderWay:
    run, ledger = settling.run, settling.ledger
    samples = ledger.span(units[-1])[1] - ledger.span(units[0])[0]
    began_s = time.perf_counter()
    data = run.read(ledger, units)
    settling.data_s += time.perf_counter() - began_s
    received = _received(pipe, run, traffic, turn)
    sums = run.gradients()
    with _computing(run, f"forward of {samples} samples"):
        paced = run.pace.part(samples, pipe.forward_part, micro_batch=turn.number)
        with paced, run.memory.forward_backward():
            sums.begin_forward()
            batch = to_device(data, run.device, non_blocking=copies_asynchronously(run.device))
            with autocast(run.device_precision, run.device), run.recomputation.region():
                ran = pipe.run(lambda: run.loss_fn(run.model, batch), received)
                loss: Loss | None = None
                if ran.handed_on is None:
                    loss = as_loss(ran.result, num_samples=samples)
    if received is not None and not received.is_leaf:
        raise ModelError(
            "what came from the stage before went through a re-entrant checkpoint, which loses its gradient. Take "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave it to Config(recompute=True)."
        )
    if ran.handed_on is not None:
        traffic.hand_on(ran.handed_on)
        return _UnderWay(received, ran.handed_on, samples)
    assert loss is not None
    require_metrics(loss, run.nature.metric_names, settling.number)
    require_gradient(loss)
    settling.losses.add(loss, units)
    return _UnderWay(received, loss.total * settling.loss_factor, samples)


def _received(pipe: Pipe, run: Run, traffic: Traffic, turn: Turn) -> torch.Tensor | None:
    if pipe.is_first:
        return None
    with _waiting(run):
        parcel = traffic.receive(turn)
    assert parcel is not None, "a stage always hands something on"
    return parcel.tensor.to(run.device).requires_grad_(parcel.wants_gradient)


def _backward(pipe: Pipe, settling: Settling, traffic: Traffic, turn: Turn, under_way: _UnderWay) -> None:
    run, sums, output, received = settling.run, settling.run.gradients(), under_way.output, under_way.received
    assert output is not None
    gradient: torch.Tensor | None = None
    if not pipe.is_last:
        with _waiting(run):
            parcel = traffic.receive(turn)
        gradient = None if parcel is None else parcel.tensor.to(run.device)
    if output.requires_grad and (pipe.is_last or gradient is not None):
        with _computing(run, f"backward of {under_way.samples} samples"):
            paced = run.pace.part(under_way.samples, pipe.backward_part, micro_batch=turn.number)
            with paced, run.memory.forward_backward():
                sums.begin_backward(last=False)
                torch.autograd.backward(output, gradient)
                sums.end_backward()
    if received is not None:
        traffic.send_back(received.grad)


@contextmanager
def _computing(run: Run, what: str) -> Iterator[None]:
    run.stopwatch.start()
    with memory_explained(run.group, run.device, what, _ROOM):
        yield
    run.stopwatch.stop()


@contextmanager
def _waiting(run: Run) -> Iterator[None]:
    """What others or links make this rank wait for."""
    run.exposed.start()
    yield
    run.exposed.stop()
