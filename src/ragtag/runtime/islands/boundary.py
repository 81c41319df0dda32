"""When all ranks of an island stop for the others: before the first step, between steps, after the last one.

The one idea: each of these is a loop of calls of the group that all ranks make alike, until the leader's header says
that training goes on. Where a rank is lost meanwhile, the call is made again by those who are left.
"""

from collections.abc import Callable
from functools import partial

from ragtag.runtime.islands.taking_part import TakingPart
from ragtag.runtime.run import Run
from ragtag.runtime.script import ScriptPosition

WithAll = Callable[[Callable[[], str], str], str]
"""Makes a call with all ranks, however many are lost meanwhile."""


def begin(run: Run, script: ScriptPosition, with_all: WithAll, last: int) -> None:
    """Before a loop of steps up to `last`: the first time, begin with what all islands begin with."""
    islands = run.islands
    if not isinstance(islands, TakingPart):
        return
    islands.plan_steps(last)
    while islands.begins:
        with_all(partial(islands.exchange, islands.first_header), "joining the other islands")
        islands.take()


def between_steps(run: Run, script: ScriptPosition, with_all: WithAll) -> None:
    """Send what is due, and take in what has arrived, where all ranks have agreed to."""
    islands = run.islands
    if not isinstance(islands, TakingPart):
        return
    islands.at_boundary(script)
    while run.boundary.outer_agreed:
        with_all(partial(islands.exchange, islands.next_header), "exchanging with other islands")
        run.boundary.outer_agreed = not islands.take()


def end(run: Run, script: ScriptPosition, with_all: WithAll) -> None:
    """After the run's last step, merge for the last time: all wait, and hold the same values after it."""
    islands = run.islands
    if not isinstance(islands, TakingPart) or not islands.ends_after(run.committed):
        return
    deadline_s = islands.deadline_s()
    done = False
    while not done:
        with_all(partial(islands.exchange, partial(islands.last_header, deadline_s)), "the last round of all islands")
        done = islands.take()
    islands.over()
