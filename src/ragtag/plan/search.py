"""Candidate plans for a cluster, priced, with one chosen and why.

The one idea: every layout is a candidate with a predicted rate or a reason why it cannot be; the choice is the fastest
one that the runtime can run, and a faster one that it cannot run yet is named beside it.
"""

from collections.abc import Sequence

import msgspec

from ragtag.core.errors import SettingError
from ragtag.core.quantities import format_bytes
from ragtag.cost.candidate import Candidate, Prediction
from ragtag.cost.device import memory_bytes
from ragtag.cost.problem import Problem
from ragtag.cost.step import predict_on
from ragtag.plan.islands import islands
from ragtag.plan.pipeline import pipelines
from ragtag.plan.replicated import Solver, Way, even
from ragtag.plan.sharded import zero

REPLICATED = Way(name="replicated")
OWN_SIZES = Way(name="replicated, own micro-batch", own_size=True)
_RECOMPUTE = Way(name="replicated, recompute", own_size=True, recompute=True)
_SAME = 1e-3
"""Rates within this part of each other count as equal: the simpler candidate, named first, is taken."""
EXACT_BELOW = 0.15
"""Exact synchronisation that costs less than this part of the speed is never given up for an outer loop."""
_LARGE = 200
"""From so many devices on, the variants of a layout look only at the subset that the layout itself chose."""


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate with its prediction, or the name of one that cannot be and why."""

    name: str
    candidate: Candidate | None = None
    prediction: Prediction | None = None
    why_not: str = ""
    """Why there is no candidate, or why the runtime cannot run it; empty: it can."""

    @property
    def runnable(self) -> bool:
        """Whether `ragtag launch` can run it."""
        return self.candidate is not None and not self.candidate.not_yet

    @property
    def has_outer_loop(self) -> bool:
        """Whether devices synchronise exactly within islands only."""
        return self.candidate is not None and self.candidate.layout == "islands"

    @property
    def rate(self) -> float:
        """Effective samples/s; 0 where there is no candidate."""
        return 0.0 if self.prediction is None else self.prediction.effective_samples_per_s


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what was taken."""

    candidates: tuple[Priced, ...]
    chosen: int
    """Index into `candidates`."""
    reason: str

    @property
    def best(self) -> Priced:
        """The chosen one."""
        return self.candidates[self.chosen]


def search(problem: Problem) -> Choice:
    """Return all candidates, the fastest runnable one chosen (the fastest of all where none is runnable).

    Raises:
        SettingError: the model fits in no way; says what is missing and by how much.
    """
    everybody = tuple(range(len(problem.ranks)))
    solver = Solver(problem, REPLICATED)
    candidates = [price(problem, solver.best(), REPLICATED.name)]
    if candidates[0].candidate is None:
        candidates[0] = msgspec.structs.replace(candidates[0], why_not=why_no_device_fits(problem))
    inside = _ranks_of(problem, candidates[0].candidate) or everybody
    if len(inside) < len(everybody):
        candidate = solver.candidate(everybody)
        name = "replicated, all devices"
        renamed = candidate and msgspec.structs.replace(candidate, name=name)
        candidates.append(price(problem, renamed, name, "it does not fit on every device"))
    candidates += _variants(problem, inside)
    candidates.append(price(problem, even(problem), "even shares (as DDP)", "the model does not fit on every device"))
    candidates += [_zero(problem, stage, inside) for stage in (1, 2, 3)]
    candidates.append(
        price(
            problem,
            pipelines(problem),
            "uneven pipeline",
            "no cut fits" if problem.blocks else "blocks were not measured (ragtag profile measures them)",
        )
    )
    if len({rank.host for rank in problem.ranks}) > 1:
        no_cut = "no slower links that cut the cluster into a few parts, or a part is too small"
        found = [price(problem, each, each.name) for each in islands(problem)]
        candidates += found or [Priced(name="islands", why_not=no_cut)]
    return _choose(problem, candidates)


def price(problem: Problem, candidate: Candidate | None, name: str, why_not: str = "it does not fit") -> Priced:
    """Return `candidate` with its prediction; None becomes a candidate of that `name` that cannot be, and why."""
    if candidate is None:
        return Priced(name=name, why_not=why_not)
    return Priced(
        name=candidate.name,
        candidate=candidate,
        prediction=predict_on(problem, candidate),
        why_not=f"the runtime cannot run {candidate.not_yet} yet" if candidate.not_yet else "",
    )


def _ranks_of(problem: Problem, candidate: Candidate | None) -> tuple[int, ...]:
    names = set() if candidate is None else {part.device for part in candidate.parts}
    return tuple(index for index, rank in enumerate(problem.ranks) if rank.name in names)


def _variants(problem: Problem, inside: tuple[int, ...]) -> list[Priced]:
    """What micro-batches and recompute of each device's own would give, where memory limits any."""
    if all(device.memory is None or device.capacity_bytes is None for device in problem.alike):
        return []
    found = []
    for way in (OWN_SIZES, _RECOMPUTE):
        if way.recompute and all(memory_bytes(device, 1, recompute=True) is None for device in problem.alike):
            continue
        solver = Solver(problem, way)
        candidate = solver.candidate(inside) if len(problem.ranks) > _LARGE else solver.best()
        found.append(price(problem, candidate, way.name))
    return found


def _zero(problem: Problem, stage: int, inside: tuple[int, ...]) -> Priced:
    everybody = tuple(range(len(problem.ranks)))
    subsets = dict.fromkeys((inside,) if len(everybody) > _LARGE and inside else (inside, everybody))
    found = [zero(problem, stage, subset) for subset in subsets]
    priced = [price(problem, slices.candidate, f"uneven ZeRO-{stage}", slices.why_not) for slices in found]
    return max(priced, key=lambda one: one.rate)


def why_no_device_fits(problem: Problem) -> str:
    """Return which constraint no device meets, and by how much the closest one misses it."""
    unit = min(problem.model.unit, problem.global_batch_size)
    short = []
    for rank in problem.ranks:
        needed = memory_bytes(rank.device, unit)
        if needed is not None and rank.device.capacity_bytes is not None:
            short.append((needed - rank.device.capacity_bytes, needed, rank.name, rank.device.capacity_bytes))
    missing, needed, name, capacity = min(short)
    samples = "one sample" if unit == 1 else f"one unit of {unit} samples"
    return (
        f"memory: the model with {samples} needs {format_bytes(needed)}; the device that comes closest, '{name}', has "
        f"{format_bytes(capacity)}: {format_bytes(missing)} too few"
    )


def _choose(problem: Problem, candidates: Sequence[Priced]) -> Choice:
    feasible = [index for index, priced in enumerate(candidates) if priced.candidate is not None]
    if not feasible:
        raise SettingError(
            f"No plan fits. {candidates[0].why_not[:1].upper()}{candidates[0].why_not[1:]}; and "
            + "; ".join(f"{one.name}: {one.why_not}" for one in candidates[1:] if one.name != "even shares (as DDP)")
            + ". Add memory or devices, take a smaller model, or profile with recompute."
        )
    asked = [index for index in feasible if _is_asked_for(problem, candidates[index])]
    if not asked:
        why = next((one.why_not for one in candidates if one.name == "islands"), "all devices are on one host")
        raise SettingError(f'mode = "{problem.mode}" does not fit this cluster: {why}.')
    runnable = [index for index in asked if candidates[index].runnable] or asked
    chosen = _fastest(candidates, runnable)
    exact = [index for index in runnable if not candidates[index].has_outer_loop]
    if candidates[chosen].has_outer_loop and exact:
        fastest = _fastest(candidates, exact)
        if cost_of_exact(candidates[fastest], candidates[chosen]) < EXACT_BELOW:
            chosen = fastest
    return Choice(candidates=tuple(candidates), chosen=chosen, reason=_reason(problem, candidates, chosen))


def cost_of_exact(exact: Priced, outer: Priced) -> float:
    """Return what part of the speed that islands have, whose links cost nothing, exact synchronisation gives away: by
    waiting for links, or by leaving devices out."""
    assert outer.prediction is not None
    return 1 - exact.rate / outer.prediction.samples_per_s


def _is_asked_for(problem: Problem, priced: Priced) -> bool:
    candidate = priced.candidate
    assert candidate is not None
    if problem.mode == "auto":
        return True
    kind = "exact" if not priced.has_outer_loop else "async" if candidate.asynchronous else "islands"
    return kind == problem.mode


def _fastest(candidates: Sequence[Priced], among: Sequence[int]) -> int:
    fastest = max(candidates[index].rate for index in among)
    return next(index for index in among if candidates[index].rate >= fastest * (1 - _SAME))


def _reason(problem: Problem, candidates: Sequence[Priced], chosen: int) -> str:
    best = candidates[chosen]
    candidate, prediction = best.candidate, best.prediction
    assert candidate is not None
    assert prediction is not None
    working = sum(part.samples > 0 for part in candidate.parts)
    parts = [
        f"{candidate.name} on {len(candidate.parts)} of {len(problem.ranks)} devices: {best.rate:.4g} samples/s, "
        f"{100 * prediction.eta:.0f} % of what all would do alone, added up"
    ]
    if working < len(candidate.parts):
        parts.append(f"{len(candidate.parts) - working} of them with no share")
    if candidate.left_out:
        named = ", ".join(candidate.left_out[:4]) + (" and more" if len(candidate.left_out) > 4 else "")
        whole = next((one for one in candidates if one.name == "replicated, all devices" and one.rate), None)
        cost = "" if whole is None or whole is best else f" (with all: {_percent(whole.rate / best.rate - 1)})"
        parts.append(f"without {named}{cost}")
    if not best.runnable:
        parts.append(f"nothing that the runtime can run fits: {candidates[0].why_not}")
    if candidate.note:
        parts.append(candidate.note)
    if problem.mode != "auto":
        parts.append(f'as mode = "{problem.mode}" asks')
    others = [one for one in candidates if one is not best and one.rate]
    if others:
        second = max(others, key=lambda one: one.rate)
        difference = _percent(second.rate / best.rate - 1)
        if second.rate <= best.rate * (1 + _SAME):
            parts.append(f"next: {second.name}, {difference}")
        elif second.why_not or problem.mode != "auto":
            parts.append(f"{second.name} would be {difference}, but {second.why_not or 'is not asked for'}")
        else:
            parts.append(
                f"{second.name} would be {difference} in progress per second by a fit, but exact synchronisation costs "
                f"{_percent(cost_of_exact(best, second))[1:]} of the speed here, and is kept below {EXACT_BELOW:.0%}"
            )
    if not best.has_outer_loop:
        outer = [one for one in others if one.has_outer_loop and one.candidate and not one.candidate.asynchronous]
        parts += [f"{one.name}: {_percent(one.rate / best.rate - 1)} ({_note(one)})" for one in outer]
    return "; ".join(parts)


def _note(priced: Priced) -> str:
    return "" if priced.candidate is None else priced.candidate.note


def _percent(part: float) -> str:
    return f"{part:+.1%}".replace("%", " %")
