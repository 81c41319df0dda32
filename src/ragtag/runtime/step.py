"""One training step, top to bottom.

Take this rank's units from the ledger, add up the sums of their losses and gradients, reduce over ranks while the last
backward still runs, vote, and only then touch the parameters.
"""

import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.group import raise_failure
from ragtag.comm.passing import GenerationEnded
from ragtag.core.errors import ModelError
from ragtag.core.mixing import seed_for
from ragtag.core.values import StepReport
from ragtag.runtime.batches import to_device
from ragtag.runtime.boundary import what_signals_ask
from ragtag.runtime.device import copies_asynchronously
from ragtag.runtime.loss import Loss, as_loss, require_gradient, require_metrics
from ragtag.runtime.out_of_memory import OwnWork, memory_explained
from ragtag.runtime.pipe.computing import compute_stage
from ragtag.runtime.precision import autocast
from ragtag.runtime.random_watch import RandomWatch
from ragtag.runtime.randomness import preserved_random_state, seed_everything
from ragtag.runtime.run import Run
from ragtag.runtime.settling import NoSums, Settling
from ragtag.runtime.stand_in import Cover, StoodIn
from ragtag.runtime.work import Units

_LESS_STATE = (
    "Take an optimizer that keeps less (SGD without momentum keeps nothing, with momentum half of what Adam keeps; "
    "foreach=False needs less on the way), or start without this device."
)


def run_step(run: Run, number: int, cover: Cover) -> StepReport:
    """Run and commit step `number`; raises what the user's code raises, or a RagtagError, with nothing applied.

    `cover` stands in for this rank's thread where it stalls in its data or its forward.
    """
    started_s = time.perf_counter()
    if run.late_report is not None:
        report, run.late_report = run.late_report, None
        return report
    run.pace.step(number)
    settling = cover.settled(number)
    if settling is None and run.resuming and not run.in_rounds:  # in rounds, nothing of a step is one rank's own
        settling = resumed(run, number)
    elif settling is None:
        # 1. Own work: the sum of losses and gradients over the units the ledger says are ours.
        run.resuming = False
        settling = Settling(run, number)
        cover.begin_step(number)
        run.prefetch(number)
        run.vitals.start()
        try:
            with cover.covering(settling):
                work = run.work_of(settling.ledger)
                compute(settling, work, cover)
        except StoodIn:
            settling = None  # and with the error goes what its forward kept in memory
        if settling is None:
            settling = cover.settled(number)
            assert settling is not None, "who stands in for a step settles it, or leaves an error"
            if settling.outcome is not None:
                run.stopwatch.forget()

    # 2. Reduce and vote, until everybody holds the same sum of everything.
    if settling.outcome is None:
        in_hand = settling
        settling.come_back()
        settling.settle(lambda units: compute(in_hand, units, cover))

    # 3. Apply it, or skip it, everywhere alike.
    report = apply(settling, started_s)
    cover.finished(settling, report.wall_s)
    return report


def resumed(run: Run, number: int) -> Settling:
    """The first step of a generation: with what this rank's sum holds of it already."""
    in_hand = run.in_hand
    if in_hand is None or in_hand.number != number or in_hand.outcome is not None:
        in_hand = Settling(run, number)
    in_hand.resume()
    run.resuming = False
    return in_hand


def compute(settling: Settling, work: Iterable[Units], cover: Cover) -> None:
    """Add micro-batches to this rank's sums, smaller ones where its memory does not hold them; in a pipeline, its
    stage's part of all of them."""
    if settling.run.pipe is not None:
        compute_stage(settling.run.pipe, settling)
        return
    own, group = OwnWork(settling, work, cover), settling.run.group
    settling.run.contention.begin_work()
    failed_since_s = None
    for units in own:
        began_s = time.perf_counter()
        if failed_since_s is not None:
            settling.redo_s += began_s - failed_since_s
            failed_since_s = None
        if group.elastic:
            raise_failure(group)
        with own.surviving():
            _add_micro_batch(settling, units, own, cover)
            continue
        failed_since_s = began_s
    if failed_since_s is not None:
        settling.redo_s += time.perf_counter() - failed_since_s
    settling.run.gradients().idle_until(settling.num_rounds)


def _add_micro_batch(settling: Settling, units: Units, own: OwnWork, cover: Cover) -> None:
    run, ledger, number = settling.run, settling.ledger, settling.number
    group, sums = run.group, run.gradients()
    num_samples = ledger.span(units[-1])[1] - ledger.span(units[0])[0]
    cover.begin_micro_batch(num_samples)
    group.note(number, "reading data")
    waited_s = time.perf_counter()
    data = run.read(ledger, units)
    data_s = time.perf_counter() - waited_s
    cover.begin_forward()
    group.note(number, "forward and backward")
    run.stopwatch.start()
    paced = run.pace.forward_backward(num_samples)
    with _random_numbers_of(run, number, units[0]), paced, run.memory.forward_backward():
        sums.begin_forward()
        loss = _forward(run, number, data, num_samples)
        cover.begin_backward()
        is_last = own.is_last()
        settling.adding = True
        run.buffers.end_forward(num_samples)
        settling.losses.add(loss, units)
        sums.begin_backward(last=is_last)
        if loss.total.requires_grad:
            (loss.total * settling.loss_factor).backward()
        sums.end_backward()
    run.stopwatch.stop()
    settling.data_s += data_s
    ledger.record_sum(group.rank, units)
    settling.adding = False


def apply(settling: Settling, started_s: float, *, late: bool = False) -> StepReport:
    """Touch parameters, optimizer, scheduler and buffers, or none of them. Nothing is asked of others where it comes
    `late`: they may have done so before."""
    run, number, outcome, ballots = settling.run, settling.number, settling.outcome, settling.ballots
    assert outcome is not None
    sums, buffers = run.gradients(), run.buffers
    applying_s = time.perf_counter()
    if isinstance(settling.sums, NoSums):
        settling.sums.hand_over(sums)
        settling.lr = float(run.lr)  # when it was agreed on, the steps before had not been applied here
    factor = 1 / (settling.loss_factor * outcome.weight) if outcome.weight else math.nan
    grad_norm = outcome.norm * factor
    if settling.skipped:
        buffers.roll_back()
        sums.begin()
    else:
        sums.install(factor * _clip_coefficient(grad_norm, run.clip_norm), outcome.has_gradient)
        state = f"the state that {type(run.optimizer).__name__} keeps, or what its step {number} needs,"
        with run.pace.optimizer(), memory_explained(run.group, run.device, state, _LESS_STATE), run.memory.update():
            run.optimizer.step()
        if run.sharding is not None and not late:  # else a new cut is about to be made, of what this rank has
            run.sharding.updated()
        with run.pace.fixed():
            run.step_scheduler(outcome.loss_total / outcome.weight)
            buffers.commit()
    run.committed = number
    run.num_applied += 1
    run.regroup_due = settling.regroups
    if run.in_hand is settling:
        run.in_hand = None
    stop, leave = what_signals_ask([ballot.stop for ballot in ballots], elastic=run.group.elastic)
    leavers = [rank for rank, ballot in enumerate(ballots) if ballot.stop == signal.SIGTERM] if leave else []
    run.boundary.agree(save=outcome.save, stop=stop, leavers=leavers, outer=outcome.outer)
    if isinstance(run.group, ElasticGroup):
        run.applied_digest = settling.held_digest
        run.group.applied(run.num_applied, run.applied_digest)
    run.apply_s = time.perf_counter() - applying_s
    if not late and not outcome.absent:  # whoever is absent has not applied it yet
        with suppress(GenerationEnded):  # the step is done; the next call regroups
            run.check_replicas(number)
    run.loader.keep(lambda key: key[0] > number)  # what others have pulled from us
    run.keep_prefetched()
    report = StepReport(
        number=number,
        loss=outcome.loss_total / outcome.weight if outcome.weight else math.nan,
        metrics={
            name: value / outcome.weight if outcome.weight else math.nan
            for name, value in zip(run.nature.metric_names, outcome.metrics)
        },
        grad_norm=grad_norm,
        lr=settling.lr,
        samples=settling.ledger.samples,
        weight=outcome.weight,
        skipped=settling.skipped,
        wall_s=time.perf_counter() - started_s,
        predicted_s=settling.predicted_s,
        shares=tuple(ballot.samples for ballot in ballots),
        compute_s=outcome.compute_s,
        wait_s=outcome.wait_s,
        comm_s=outcome.comm_s,
        sent_bytes=tuple(ballot.sent_bytes for ballot in ballots),
        plan_id=settling.plan_id,
        generation=run.generation,
    )
    run.islands.stepped(report)
    run.recorder.step(run, settling, report)
    return report


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
    with autocast(run.device_precision, run.device), run.recomputation.region():
        loss = as_loss(run.loss_fn(run.model, batch), num_samples=num_samples)
    require_metrics(loss, run.nature.metric_names, step)
    require_gradient(loss)
    return loss


def _clip_coefficient(grad_norm: float, clip_norm: float | None) -> float:
    """As `torch.nn.utils.clip_grad_norm_`, computed once from the norm that all ranks share."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (grad_norm + 1e-6))
