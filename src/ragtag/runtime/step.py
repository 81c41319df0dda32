"""One training step, top to bottom.

Take this rank's units from the ledger, add up the sums of their losses and gradients, reduce over ranks while the last
backward still runs, vote, and only then touch the parameters.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ragtag.control.ballot import Ballot, Outcome, pack, tally, unpack
from ragtag.core.errors import LossError, ModelError, NonFiniteError
from ragtag.core.ledger import Ledger
from ragtag.core.mixing import seed_for
from ragtag.core.values import StepReport
from ragtag.runtime.batches import to_device
from ragtag.runtime.device import copies_asynchronously
from ragtag.runtime.loss import Loss, as_loss, require_gradient
from ragtag.runtime.loss_sums import LossSums
from ragtag.runtime.precision import autocast
from ragtag.runtime.random_watch import RandomWatch
from ragtag.runtime.randomness import preserved_random_state, seed_everything
from ragtag.runtime.run import Run

log = logging.getLogger("ragtag")

NON_FINITE_LIMIT = 10
"""Steps in a row that may be skipped for non-finite values before the run ends, fp16 back-off aside."""


def run_step(run: Run, number: int) -> StepReport:
    """Run and commit step `number`; raises what the user's code raises, or a RagtagError, with nothing applied."""
    started = time.perf_counter()
    group, sums, buffers = run.group, run.gradients(), run.buffers
    plan_id, ledger = run.plan_id, run.ledger_of(number)
    run.prefetch(number)
    run.pace.step(number)
    losses = LossSums(run.nature.metric_names, run.device)
    sums.begin()
    buffers.begin()

    # 1. Own work: the sum of losses and gradients over the units the ledger says are ours.
    data_s = 0.0
    work = run.work_of(ledger)
    for units in work:
        group.note(number, "reading data")
        waited = time.perf_counter()
        data = run.read(ledger, units)
        data_s += time.perf_counter() - waited
        group.note(number, "forward and backward")
        run.stopwatch.start()
        num_samples = ledger.span(units[-1])[1] - ledger.span(units[0])[0]
        paced = run.pace.forward_backward(num_samples)
        with _random_numbers_of(run, number, units[0]), paced, run.memory.forward_backward():
            loss = _forward(run, number, data, num_samples)
            losses.add(loss, units)
            sums.begin_backward(last=work.is_last())
            if loss.total.requires_grad:
                (loss.total * run.loss_factor).backward()
        run.stopwatch.stop()
        ledger.record_sum(group.rank, units)

    # 2. Reduce and vote; again, without overlap, if a gradient came after its bucket had left.
    group.note(number, "reducing gradients")
    run.exposed.start()
    sums.launch_rest()
    buffers.launch()
    attempt, compute_s, exposed_s = 0, 0.0, 0.0
    while True:
        sums.wait()
        buffers.wait()
        run.exposed.stop()
        (total, weight, *metrics), (norm, lr) = losses.numbers(sums.norm(), run.lr)  # the step's one synchronisation
        compute_s += run.stopwatch.take()
        exposed_s += run.exposed.take()
        ballot = Ballot(
            step=number,
            plan_hash=int(plan_id, 16),
            attempt=attempt,
            launched_too_early=sums.launched_too_early,
            contents_hash=ledger.contents_hash(group.rank),
            samples=ledger.summed_samples(group.rank),
            weight=weight,
            loss_total=total,
            norm=norm,
            compute_s=compute_s,
            exposed_s=exposed_s,
            data_s=data_s,
            apply_s=run.apply_s,
            metrics=tuple(metrics),
            has_gradient=sums.has_gradient(),
        )
        ballots = [unpack(data, num_metrics=len(metrics)) for data in group.exchange(pack(ballot))]
        outcome = tally(ballots, expected_hash=ledger.expected_hash)
        if not outcome.reduce_again:
            break
        attempt += 1
        log.info(
            "step %d: a gradient came after its bucket had left; reducing again, from now on after backward", number
        )
        run.exposed.start()
        sums.launch_again()

    # 3. Everybody holds the same sum: apply it, or skip it, everywhere alike.
    applying = time.perf_counter()
    factor = 1 / (run.loss_factor * outcome.weight) if outcome.weight else math.nan
    grad_norm = outcome.norm * factor
    skipped = _reason_to_skip(run, number, ledger, losses, outcome)
    if skipped:
        buffers.roll_back()
        sums.begin()
    else:
        sums.install(factor * _clip_coefficient(grad_norm, run.clip_norm), outcome.has_gradient)
        with run.pace.optimizer():
            run.optimizer.step()
        with run.pace.fixed():
            run.step_scheduler(outcome.loss_total / outcome.weight)
            buffers.commit()
    run.committed = number
    run.apply_s = time.perf_counter() - applying
    run.check_replicas(number)
    run.loader.keep(lambda key: key[0] > number)  # what others have pulled from us
    run.follow_speeds(ballots)
    return StepReport(
        number=number,
        loss=outcome.loss_total / outcome.weight if outcome.weight else math.nan,
        metrics={
            name: value / outcome.weight if outcome.weight else math.nan
            for name, value in zip(run.nature.metric_names, outcome.metrics)
        },
        grad_norm=grad_norm,
        lr=lr,
        samples=ledger.samples,
        weight=outcome.weight,
        skipped=skipped,
        wall_s=time.perf_counter() - started,
        shares=tuple(ballot.samples for ballot in ballots),
        compute_s=outcome.compute_s,
        wait_s=outcome.wait_s,
        comm_s=outcome.comm_s,
        plan_id=plan_id,
        generation=run.generation,
    )


@contextmanager
def _random_numbers_of(run: Run, step: int, unit: int) -> Iterator[None]:
    """In runs by unit the unit's own random numbers, of which the script's notice nothing; in others, none at all."""
    if run.by_unit:
        with preserved_random_state(run.device):
            seed_everything(seed_for(run.seed, step, unit), run.device)
            yield
        return
    watch = RandomWatch(run.device, torch_only=True)
    yield
    if watch.drew():
        raise ModelError(
            f"forward drew random numbers in step {step}, although it drew none in the trial before step 1. "
            f"Fix what is computed together, so that any split gives the same numbers: Config(unit=...)."
        )


def _forward(run: Run, step: int, data: Any, num_samples: int) -> Loss:
    """Forward and loss of one micro-batch, from the step's buffers."""
    run.buffers.begin_unit()
    batch = to_device(data, run.device, non_blocking=copies_asynchronously(run.device))
    with autocast(run.device_precision, run.device):
        loss = as_loss(run.loss_fn(run.model, batch), num_samples=num_samples)
    run.buffers.end_forward(num_samples)
    if tuple(sorted(loss.metrics)) != run.nature.metric_names:
        raise LossError(
            f"loss_fn returned the metrics {sorted(loss.metrics)} in step {step}, but "
            f"{list(run.nature.metric_names)} in the trial. Return the same names every time."
        )
    require_gradient(loss)
    return loss


def _clip_coefficient(grad_norm: float, clip_norm: float | None) -> float:
    """As `torch.nn.utils.clip_grad_norm_`, computed once from the norm that all ranks share."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (grad_norm + 1e-6))


def _reason_to_skip(run: Run, step: int, ledger: Ledger, losses: LossSums, outcome: Outcome) -> str:
    """Why no rank applies this step, or an empty string. Ends the run after ten non-finite steps in a row."""
    if outcome.finite and outcome.weight == 0:
        return "the step's total weight is 0: nothing to average over"
    explained = run.loss_scale.update(finite=outcome.finite)
    if outcome.finite:
        run.non_finite_steps = 0
        return ""
    if explained:
        return f"fp16 overflow: loss scale lowered to {run.loss_scale.value:g}"
    reason, origin = _find_non_finite(run, step, ledger, losses)
    run.non_finite_steps += 1
    if run.non_finite_steps == 1:
        run.warn(f"step {step} skipped: {reason}")
    if run.non_finite_steps >= NON_FINITE_LIMIT:
        error = NonFiniteError(f"{NON_FINITE_LIMIT} steps in a row were skipped, the last one, {step}: {reason}")
        error.origin_rank = origin
        raise error
    return reason


def _find_non_finite(run: Run, step: int, ledger: Ledger, losses: LossSums) -> tuple[str, int]:
    """Ask all ranks whose loss or gradient it was (slow path): a text that names rank and samples, and the rank."""
    sums = run.gradients()
    samples: list[int] = []
    for units in losses.non_finite_units():
        start, stop = ledger.span(units[0])[0], ledger.span(units[-1])[1]
        samples.extend(run.sampler.indices(step, start, stop))
    bad_gradients = [
        name
        for index, name in enumerate(sums.names)
        if (own := sums.own_sum(index)) is not None and not bool(torch.isfinite(own).all())
    ]
    answers = run.group.gather(f"non-finite in step {step}", [samples[:8], bad_gradients[:3]])
    for rank, (indices, names) in enumerate(answers):
        if indices or names:
            where = f"rank {rank} ({run.group.hosts[rank]})"
            what = "loss" if indices else "gradient"
            of = f" of samples {', '.join(map(str, indices))}" if indices else f" of '{names[0]}'"
            return f"non-finite {what}{of} on {where}", rank
    return "the sum over ranks is not finite, although every rank's own part is", 0
