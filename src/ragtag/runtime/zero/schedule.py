"""In which order a round needs blocks and gives up their gradients: one list for all ranks, computing or not.

The one idea: gathering a block takes every rank, so a rank without samples has to know when. One rank's forward and
backward are written down before step 1; from then on every rank goes down the same list, and all that is decided
(what is gathered, what is fetched ahead, what is released) is a function of the list and the place in it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["use", "done", "reduce"]


class Event(NamedTuple):
    """A block is needed, is not needed for now, or has all its gradients."""

    kind: Kind
    block: int


class Noted(NamedTuple):
    """Something that happened in the round that was written down."""

    kind: Literal["forward", "done", "backward", "gradient"]
    which: int
    """A block; or, of a gradient, a parameter."""


class Schedule(NamedTuple):
    """What all ranks go down in every round."""

    events: tuple[Event, ...] = ()
    num_forward: int = 0
    """How many of them come before backward."""
    arriving: Mapping[int, frozenset[int]] = {}
    """By block, the parameters whose gradients arrive."""


def schedule_of(noted: Sequence[Noted], block_of: Mapping[int, int], *, gathers: bool) -> Schedule:
    """Return the events of a round.

    A block has all its gradients when the last of them has arrived. One without any is done with when another one's
    backward begins.

    Args:
        noted: forward and backward of one micro-batch, in order.
        block_of: by parameter.
        gathers: blocks are gathered; else only gradients matter.
    """
    last: dict[int, int] = {}
    arriving: dict[int, set[int]] = {}
    for place, (kind, which) in enumerate(noted):
        if kind == "gradient":
            last[block_of[which]] = place
            arriving.setdefault(block_of[which], set()).add(which)
    events: list[Event] = []
    num_forward: int | None = None
    idle: int | None = None
    """A block in backward whose gradients nobody waits for."""
    for place, (kind, which) in enumerate(noted):
        if num_forward is None and kind in ("backward", "gradient"):
            num_forward = len(events)
        if kind == "gradient":
            if last[block_of[which]] == place:
                events.append(Event("reduce", block_of[which]))
            continue
        if not gathers:
            continue
        if idle is not None and which != idle:
            events.append(Event("done", idle))
            idle = None
        events.append(Event("done" if kind == "done" else "use", which))
        if kind == "backward" and last.get(which, -1) < place:
            idle = which
    if idle is not None:
        events.append(Event("done", idle))
    return Schedule(
        tuple(events),
        len(events) if num_forward is None else num_forward,
        {block: frozenset(members) for block, members in arriving.items()},
    )


def next_use(events: Sequence[Event], place: int) -> int | None:
    """Return the block that is needed first from `place` on."""
    return next((block for kind, block in events[place:] if kind == "use"), None)


def gathers(events: Sequence[Event]) -> Counter[int]:
    """Return how often a round gathers each block, none being there at its beginning; the root, 0, is its first."""
    present: set[int] = set()
    counts: Counter[int] = Counter()

    def have(block: int | None) -> None:
        if block is not None and block not in present:
            present.add(block)
            counts[block] += 1

    have(0)
    have(next_use(events, 0))
    for place, (kind, block) in enumerate(events, start=1):
        following = next_use(events, place)
        if kind == "use":
            have(block)
            have(following)
        elif kind == "reduce" or following != block:
            present.discard(block)
    return counts
