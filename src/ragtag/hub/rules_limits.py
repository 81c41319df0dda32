"""How long and how large anything in a worker's frame may be, so that no frame makes the hub grow or choke."""

import math

from ragtag.hub.frames import Beat, Checkpointed, Described, Fail, FromWorker, Hello, Join, Trouble

WORKERS_LIMIT = 4096
"""Incarnations that are known at a time."""
TEXT_LIMIT = 4000
"""Characters of an error or a reason; longer ones are cut."""
DESCRIPTION_LIMIT = 1 << 20
QUARRELS_LIMIT = 64
DIGESTS_LIMIT = 64

_NAME_LIMIT = 255
_NUMBER_LIMIT = 1 << 53


def absurd(frame: FromWorker) -> str:
    """Return what is wrong with the sizes in `frame`; empty: nothing."""
    short: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    if isinstance(frame, Hello):
        member = frame.member
        short = (frame.run, frame.version, member.inc, member.name, member.host, member.address, member.boot_id)
        numbers = (frame.generation, member.local_rank, frame.expected)
        if not member.inc:
            return "an empty incarnation"
        if not 0 <= member.store_port < 1 << 16:
            return f"store port {member.store_port}"
        if not 1 <= frame.expected <= WORKERS_LIMIT:
            return f"{frame.expected} workers expected"
    else:
        short = (frame.inc,)
        numbers = (frame.generation,)
        if isinstance(frame, Join):
            short += (frame.applied_digest, frame.held_digest, frame.in_call)
            numbers += (frame.applied,)
        elif isinstance(frame, Fail):
            short += (frame.suspect,)
        elif isinstance(frame, Beat):
            short += (frame.doing, frame.applied_digest)
            numbers += (frame.step, frame.applied, frame.doing_s)
        elif isinstance(frame, Trouble):
            numbers += (frame.step,)
        elif isinstance(frame, Checkpointed):
            numbers += (frame.step,)
            if len(frame.name) > TEXT_LIMIT:
                return f"a name of {len(frame.name)} characters"
        elif isinstance(frame, Described) and len(frame.description) > DESCRIPTION_LIMIT:
            return f"a description of {len(frame.description)} characters"
    longest = max(map(len, short))
    if longest > _NAME_LIMIT:
        return f"a name of {longest} characters"
    wrong = [number for number in numbers if not math.isfinite(number) or not 0 <= number < _NUMBER_LIMIT]
    return f"the number {wrong[0]}" if wrong else ""


def cut(text: str) -> str:
    """Return `text`, shortened to the limit."""
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"
