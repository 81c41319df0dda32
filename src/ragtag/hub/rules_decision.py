"""What a new generation does with the step in hand, from what its members say they have applied and hold.

The one idea: a worker applies a gradient only when all members of its generation have voted, hence hold it. So if
somebody applied step L, every veteran has applied L or holds it; and if nobody did, L + 1 may be lost by none.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ragtag.hub.frames import Join


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How the members go on."""

    veterans: tuple[str, ...]
    """Incarnations by rank."""
    newcomers_fit: bool
    """Whether newcomers can be put in: no veteran is inside a call."""
    base: int
    action: Literal["apply", "redo"]


class Drifted(msgspec.Struct, frozen=True, kw_only=True):
    """Two members applied different gradients for one step: the run must not go on."""

    step: int
    first: str
    second: str


def decide(members: Sequence[str], joins: Mapping[str, Join]) -> Decision | Drifted | None:
    """Return what the generation does; None: nobody who answered is a veteran.

    Args:
        members: incarnations of the last generation, by rank.
        joins: the answers, by incarnation. A veteran is a member of the last generation that has the state.
    """
    veterans = [joins[inc] for inc in members if inc in joins and joins[inc].has_state]
    if not veterans:
        return None
    lead = max(veteran.applied for veteran in veterans)
    leaders = [veteran for veteran in veterans if veteran.applied == lead]
    odd = next((leader for leader in leaders if leader.applied_digest != leaders[0].applied_digest), None)
    if odd is not None:
        return Drifted(step=lead, first=leaders[0].inc, second=odd.inc)
    behind = [veteran for veteran in veterans if can_catch_up(veteran, leaders[0])]
    kept = [veteran for veteran in veterans if veteran in leaders or veteran in behind]
    if behind:
        base, action = lead, "apply"
    elif len(kept) == len(veterans) and all_hold_the_same(kept):
        base, action = lead + 1, "apply"
    else:
        base, action = lead, "redo"
    return Decision(
        veterans=tuple(veteran.inc for veteran in kept),
        newcomers_fit=not any(veteran.in_call for veteran in kept),
        base=base,
        action=action,
    )


def can_catch_up(veteran: Join, leader: Join) -> bool:
    """Whether `veteran` holds the very gradient that `leader` applied last. Anybody else behind copies the state."""
    return (
        veteran.applied == leader.applied - 1
        and veteran.held_digest != ""
        and veteran.held_digest == leader.applied_digest
    )


def all_hold_the_same(veterans: Sequence[Join]) -> bool:
    """Whether all hold one gradient of their next step: then somebody who is gone may have applied it."""
    held = {veteran.held_digest for veteran in veterans}
    return len(held) == 1 and "" not in held
