"""Times work of several sizes, in turn, until the medians are precise or the time is up.

The one idea: one repetition of every size after another. What disturbs the machine for a second then disturbs all sizes
alike instead of bending the curve.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ragtag.profile.statistics import is_precise

T = TypeVar("T")


def repeat_in_turn(
    run: Callable[[int], T],
    sizes: Sequence[int],
    *,
    seconds_of: Callable[[T], float],
    budget_s: float,
    clock: Callable[[], float],
    least: int = 3,
    enough: int = 7,
    most: int = 40,
    precision: float = 0.01,
) -> dict[int, list[T]]:
    """Return what `run` gave, by size, without the first call of each size (twice for the first size).

    Args:
        run: does the work once.
        sizes: growing; the larger ones are left out where `least` repetitions of all would not fit into the budget.
            The first size is always there.
        seconds_of: the time in what `run` returns.
        budget_s: how long it may take, in seconds; `least` repetitions are made whatever they take.
        clock: wall clock, in seconds.
        least: repetitions of each size, at least.
        enough: no more than so many once all medians are within `precision`; `most` in any case.
        precision: standard error of a median, relative.
    """
    started_s = clock()
    costs: dict[int, float] = {}
    for size in sizes:
        if costs:
            known = max(costs)
            estimate_s = costs[known] * size / known
            left_s = budget_s - (clock() - started_s)
            if estimate_s + least * (sum(costs.values()) + estimate_s) > left_s:
                break
        else:
            run(size)
        before_s = clock()
        run(size)
        costs[size] = clock() - before_s
    results: dict[int, list[T]] = {size: [] for size in costs}
    for rounds in range(most):
        spent_s = clock() - started_s
        if rounds >= least and spent_s + sum(costs.values()) > budget_s:
            break
        if rounds >= enough and all(
            is_precise([seconds_of(result) for result in each], precision) for each in results.values()
        ):
            break
        for size, each in results.items():
            each.append(run(size))
    return results
