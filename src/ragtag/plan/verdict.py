"""What each device adds or costs: the best plan with it against the best plan without it, in speed and in money.

The one idea: a device that is worth its place is judged by what is lost without it; one that was left out, by what
taking it in would cost, with the best share it could have.
"""

import msgspec

from ragtag.core.quantities import format_bytes
from ragtag.cost.candidate import Candidate
from ragtag.cost.problem import Problem
from ragtag.plan.replicated import Solver
from ragtag.plan.search import OWN_SIZES, REPLICATED, Choice, Priced, price

_MOST_VERDICTS = 48
_LARGE = 200
"""With more devices than these, only the plan's own subset less one device is looked at, for fewer of them."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or several equal ones on one host, of which one is judged."""

    device: str
    count: int = 1
    """Equal devices on this host, this one included."""
    keep: bool
    gain: float
    """Change of samples/s by having it: 0.09 is +9 %; infinite where nothing runs without it."""
    usd_per_million_samples: float | None = None
    """Of the best plan with it; None: no device has a price."""
    usd_without: float | None = None
    """Of the best plan without it."""
    text: str


def verdicts(problem: Problem, choice: Choice) -> tuple[Verdict, ...]:
    """Return a verdict on each kind of device on each host, in cluster order; at most 48 of them.

    Compared are plans of the chosen one's kind; where the runtime cannot run that kind, replicated ones.
    """
    groups: dict[tuple[int, str, bool], list[int]] = {}
    chosen = choice.best.candidate
    assert chosen is not None
    inside = {part.device for part in chosen.parts}
    for rank, place in enumerate(problem.ranks):
        groups.setdefault((id(problem.alike[rank]), place.host, place.name in inside), []).append(rank)
    number = max(8, min(_MOST_VERDICTS, 20_000 // len(problem.ranks)))
    solver = Solver(problem, OWN_SIZES if chosen.name == OWN_SIZES.name else REPLICATED)
    return tuple(
        _verdict(problem, choice, solver, members, within) for (_, _, within), members in list(groups.items())[:number]
    )


def _verdict(problem: Problem, choice: Choice, solver: Solver, members: list[int], within: bool) -> Verdict:
    rank = members[-1] if within else members[0]
    name = problem.ranks[rank].name
    if within:
        with_it, without = choice.best, _without(problem, choice, solver, rank)
    else:
        without, with_it = choice.best, _with(problem, choice, solver, rank)
    gain = float("inf") if not without.rate else with_it.rate / without.rate - 1
    prediction_with, prediction_without = with_it.prediction, without.prediction
    return Verdict(
        device=name,
        count=len(members),
        keep=within and gain > 0,
        gain=gain,
        usd_per_million_samples=prediction_with and prediction_with.usd_per_million_samples,
        usd_without=prediction_without and prediction_without.usd_per_million_samples,
        text=_text(with_it, without, name, within, gain),
    )


def _without(problem: Problem, choice: Choice, solver: Solver, rank: int) -> Priced:
    others = [other for other in range(len(problem.ranks)) if other != rank]
    if not others:
        return Priced(name="nothing", why_not="no device is left")
    if len(problem.ranks) > _LARGE:
        candidate = solver.candidate(tuple(other for other in _inside(problem, choice) if other != rank))
    else:
        candidate = solver.best(others, near=tuple(other for other in _inside(problem, choice) if other != rank))
    return price(problem, candidate, solver.way.name)


def _with(problem: Problem, choice: Choice, solver: Solver, rank: int) -> Priced:
    """The chosen subset and this device, which takes part whether it helps or not."""
    subset = tuple(sorted({*_inside(problem, choice), rank}))
    return price(problem, solver.candidate(subset), solver.way.name, "the model does not fit")


def _inside(problem: Problem, choice: Choice) -> list[int]:
    assert choice.best.candidate is not None
    names = {part.device for part in choice.best.candidate.parts}
    return [index for index, other in enumerate(problem.ranks) if other.name in names]


def _text(with_it: Priced, without: Priced, name: str, within: bool, gain: float) -> str:
    if with_it.candidate is None:
        return f"{name}: cannot take part ({with_it.why_not})"
    if without.candidate is None:
        return f"{name}: needed, nothing runs without it"
    words = f"{name}: {gain:+.1%}".replace("%", " %")
    if not within:
        words += ", leave it out"
    else:
        words += _holds(with_it.candidate, name)
        if gain <= 0:
            words += ", no gain"
    paid, saved = _price(with_it), _price(without)
    if paid is not None or saved is not None:
        words += f", ${paid or 0:.3g} a million samples with it, ${saved or 0:.3g} without"
    return words


def _holds(candidate: Candidate, name: str) -> str:
    part = next(part for part in candidate.parts if part.device == name)
    if part.samples:
        return ""
    return f", holds {format_bytes(part.state_bytes)} of state, batch 0" if part.state_bytes else ", batch 0"


def _price(priced: Priced) -> float | None:
    return None if priced.prediction is None else priced.prediction.usd_per_million_samples
