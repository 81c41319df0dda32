"""Whether a step is skipped, the same on all ranks, and whose samples made it so.

The one idea: what everybody sees in the votes decides; only after that, on a slow path, ranks are asked for names.
"""

from ragtag.control.ballot import Outcome
from ragtag.core.errors import NonFiniteError
from ragtag.core.ledger import Ledger
from ragtag.runtime.loss_sums import LossSums
from ragtag.runtime.run import Run
from ragtag.runtime.step_sums import StepSums

NON_FINITE_LIMIT = 10
"""Steps in a row that may be skipped for non-finite values before the run ends, fp16 back-off aside."""


def reason_to_skip(run: Run, step: int, outcome: Outcome, found: tuple[str, int]) -> str:
    """Why no rank applies this step, or an empty string. `found` is what `find_non_finite` returned, if it was asked.

    Raises:
        NonFiniteError: ten steps in a row were skipped for non-finite values.
    """
    if outcome.finite and outcome.weight == 0:
        return "the step's total weight is 0: nothing to average over"
    explained = run.loss_scale.update(finite=outcome.finite)
    if outcome.finite:
        run.non_finite_steps = 0
        return ""
    if explained:
        return f"fp16 overflow: loss scale lowered to {run.loss_scale.value:g}"
    reason, origin = found
    run.non_finite_steps += 1
    if run.non_finite_steps == 1:
        run.warn(f"step {step} skipped: {reason}")
    if run.non_finite_steps >= NON_FINITE_LIMIT:
        error = NonFiniteError(f"{NON_FINITE_LIMIT} steps in a row were skipped, the last one, {step}: {reason}")
        error.origin_rank = origin
        raise error
    return reason


def find_non_finite(
    run: Run, step: int, ledger: Ledger, losses: LossSums, gradients: StepSums | None
) -> tuple[str, int]:
    """Ask all ranks whose loss or gradient it was (slow path): a text that names rank and samples, and the rank.

    `gradients` are this rank's own; None: it has none.
    """
    samples: list[int] = []
    for units in losses.non_finite_units():
        start, stop = ledger.span(units[0])[0], ledger.span(units[-1])[1]
        samples.extend(run.sampler.indices(step, start, stop))
    bad_gradients = [] if gradients is None else gradients.non_finite()
    answers = run.group.gather(f"non-finite in step {step}", [samples[:8], bad_gradients[:3]])
    # A loss before gradients: those of a pipeline's other stages come of it.
    for rank in sorted(range(len(answers)), key=lambda each: not answers[each][0]):
        indices, names = answers[rank]
        if indices or names:
            where = f"rank {rank} ({run.group.hosts[rank]})"
            what = "loss" if indices else "gradient"
            of = f" of samples {', '.join(map(str, indices))}" if indices else f" of '{names[0]}'"
            return f"non-finite {what}{of} on {where}", rank
    return "the sum over ranks is not finite, although every rank's own part is", 0
