"""What one worker remembers about its membership, and what the hub's frames ask of it: pure functions.

The one idea: the worker is told once what to do (`Instruction`), and what it may do next depends only on the highest
generation it has seen, so a late frame or a late wake-up can do no harm (docs/membership.md).
"""

from hashlib import blake2b
from struct import pack
from typing import Literal

import msgspec
from msgspec.structs import replace as _replace

from ragtag.hub.frames import Go, Join, Prep, Started

Do = Literal[
    "ignore",  # stale
    "join",  # leave the generation for ever and send `Instruction.join`
    "flag",  # go on; at the next step boundary that all agree on, leave and send `at_boundary`
    "stop",  # leave the generation, keep everything, wait
    "wait",  # not taken in yet; nothing to wipe
    "evicted",  # end this process
    "begin",  # enter: nobody has state, rank 0's values are taken
    "copy",  # enter as a newcomer: copy the state, contribute zero until then
    "apply",  # apply the held step `base`, then enter
    "go on",  # enter; own sums stay
]
"""What a frame of the hub, or a step boundary, asks of the worker."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's memory; `WorkerState(inc=...)` is a new one's."""

    inc: str
    seen: int = 0
    """Highest generation that a `Prep` or `Go` has named. Whatever is older is dropped."""
    told: int = 0
    """Highest generation that a `Go` has begun: each is entered once."""
    group: int = 0
    """The generation it is in; 0: it is between two."""
    flagged: int = 0
    """The soft generation that it answers at the next step boundary; 0: none."""
    started: bool = True
    """False in a first generation until the hub has written down that all members hold the state."""
    has_state: bool = False
    applied: int = 0
    applied_digest: str = ""
    held_digest: str = ""
    """Of step `applied` + 1."""


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now."""

    do: Do
    join: Join | None = None
    rank: int = 0
    """Of this worker, where it enters a generation."""


IGNORE = Instruction(do="ignore")


def digest(generation: int, step: int, contents_hash: int, weight: float, skip: bool) -> str:
    """Return 16 hex characters that name a reduced gradient: equal on two workers iff they hold the same one.

    Args:
        generation: that reduced it; the same samples reduced again are other bits.
        step: counts from 1.
        contents_hash: of all units in it, 32 bits (`core/ledger.py`).
        weight: what it is divided by.
        skip: whether the step leaves the parameters as they are.
    """
    return blake2b(pack("<QQIdB", generation, step, contents_hash, weight, skip), digest_size=8).hexdigest()


def on_prep(state: WorkerState, prep: Prep, *, in_call: str = "") -> tuple[WorkerState, Instruction]:
    """Return what a `Prep` asks of this worker: "ignore", "join", "flag" or "stop".

    An apply that has begun is finished first. `in_call` is the collective call that the worker is in, if it is in one
    that newcomers cannot take part in.
    """
    if prep.generation <= state.seen:
        return state, IGNORE
    seen = _replace(state, seen=prep.generation)
    if state.inc not in prep.members:
        return _replace(seen, group=0, flagged=0), Instruction(do="stop")
    if prep.soft and state.group:
        return _replace(seen, flagged=prep.generation), Instruction(do="flag")
    return _leave(seen, in_call)


def at_boundary(state: WorkerState, *, in_call: str = "") -> tuple[WorkerState, Instruction]:
    """Return "join" at the step boundary where all members leave for a soft generation, which they agreed on by vote.

    A worker whose `Prep` has not come yet leaves all the same, and answers ("ignore" now) when it comes.
    """
    if not state.flagged:
        return _replace(state, group=0), IGNORE
    return _leave(state, in_call)


def on_failure(state: WorkerState) -> WorkerState:
    """Return the state after `Fail` was sent for this generation: it is left for ever, and everything is kept."""
    return _replace(state, group=0, flagged=0)


def on_go(state: WorkerState, go: Go) -> tuple[WorkerState, Instruction]:
    """Return what a `Go` asks of this worker: "ignore", "wait", "evicted", "begin", "copy", "apply" or "go on".

    After "apply" the caller applies the held gradient at once and calls `apply_held`; after "begin" and "copy" it calls
    `copied` when the state is complete, and sends `Ready`.
    """
    if go.generation < state.seen or go.generation <= state.told:
        return state, IGNORE
    seen = _replace(state, seen=go.generation, told=go.generation, group=0, flagged=0)
    rank = next((rank for rank, member in enumerate(go.members) if member.inc == state.inc), None)
    if rank is None:
        return seen, Instruction(do="evicted" if state.has_state else "wait")
    inside = _replace(seen, group=go.generation, started=go.action != "start")
    if rank >= go.num_veterans:
        wiped = _replace(inside, has_state=False, applied=0, applied_digest="", held_digest="")
        return wiped, Instruction(do="begin" if go.action == "start" else "copy", rank=rank)
    if state.applied < go.base:
        if go.action != "apply" or state.applied != go.base - 1 or not state.held_digest:
            raise AssertionError(f"{state} cannot follow {go}: the hub was told something else")
        return inside, Instruction(do="apply", rank=rank)
    return _replace(inside, held_digest=""), Instruction(do="go on", rank=rank)


def on_started(state: WorkerState, frame: Started) -> WorkerState:
    """Return the state that may vote, if it is this generation that has started."""
    return _replace(state, started=True) if frame.generation == state.group else state


def may_vote(state: WorkerState) -> bool:
    """Whether this worker may send its vote: it holds, and the run's state can no longer be made anew."""
    return bool(state.group and state.held_digest and state.started)


def hold(state: WorkerState, held_digest: str) -> WorkerState:
    """Return the state that holds the complete gradient of step `applied` + 1."""
    return _replace(state, held_digest=held_digest)


def apply_held(state: WorkerState) -> WorkerState:
    """Return the state after the held step was applied (or skipped, which counts)."""
    return _replace(state, applied=state.applied + 1, applied_digest=state.held_digest, held_digest="")


def copied(state: WorkerState, applied: int, applied_digest: str) -> WorkerState:
    """Return the state after the run's state was copied, or made, and verified: a veteran's."""
    return _replace(state, has_state=True, applied=applied, applied_digest=applied_digest, held_digest="")


def _leave(state: WorkerState, in_call: str) -> tuple[WorkerState, Instruction]:
    join = Join(
        generation=state.seen,
        inc=state.inc,
        has_state=state.has_state,
        applied=state.applied,
        applied_digest=state.applied_digest,
        held_digest=state.held_digest,
        in_call=in_call,
    )
    return _replace(state, group=0, flagged=0), Instruction(do="join", join=join)
