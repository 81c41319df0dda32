"""Who cannot be counted on any more, and why, in words that name the worker and its host.

The one idea: suspicion costs nothing until the next GO, so one number, the patience, decides all of it. A worker that
shows life and runs the user's own code gets ten times as long.
"""

from collections.abc import Sequence

from ragtag.hub.frames import Fail
from ragtag.hub.rules_limits import QUARRELS_LIMIT
from ragtag.hub.rules_state import HubState, Preparing, Quarrel, Worker

READING_DATA = "reading data"
"""What `Beat.doing` begins with while a worker reads its samples."""
USER_CODE = ("your code", "the script's own code", "starting", "trying the loss", "writing the checkpoint")
"""What it begins with while a worker runs the user's script, or does what takes as long as it takes."""
_COMPUTING = ("forward and backward", "evaluating")
_SLOW = 10
"""Multiples of the patience for work that nobody can bound, with live heartbeats."""
_QUARRELS = 2
"""So many failures of one pair, and one of the two must go."""
_ALONE = 3
"""So many failures that one worker alone reports, of nobody in particular."""


def beat_s(patience_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(max(patience_s / 10, 0.05), 2.0)


def suspicions(state: HubState, now_s: float) -> tuple[tuple[str, str], ...]:
    """Return (incarnation, why) of all that have become suspect by the passing of time alone."""
    preparing = state.preparing
    joined = set() if preparing is None else {join.inc for join in preparing.joins}
    inside = set(state.members) | set(() if preparing is None else preparing.members)
    watched = [worker for worker in state.workers if worker.inc in inside and not (worker.suspicion or worker.left)]
    found = []
    for worker in watched:
        why = ""
        if preparing is not None and worker.inc in preparing.members and worker.inc not in joined:
            why = _overdue(worker, preparing, state, now_s)
        hopeful = preparing is not None and preparing.last_chance
        if not why and worker.connected and not hopeful:
            why = _silent(worker, state.settings.patience_s, now_s)
        trains = preparing is None or (preparing.soft and worker.inc not in joined)
        if not why and trains and worker.inc in state.members:
            why = _stalled(worker, watched, state.settings.patience_s, now_s)
        if why:
            found.append((worker.inc, why))
    return tuple(found)


def _silent(worker: Worker, patience_s: float, now_s: float) -> str:
    silent_s = now_s - worker.heard_s
    if silent_s < patience_s - 2 * beat_s(patience_s):
        return ""
    return (
        f"no sign of life from {worker.title} for {silent_s:.3g} s (patience_s={patience_s:g}): it is frozen or "
        f"unreachable{_last_heard(worker)}"
    )


def _overdue(worker: Worker, preparing: Preparing, state: HubState, now_s: float) -> str:
    """A soft generation waits for nobody until the first old member has come to the agreed step boundary."""
    old = worker.inc in state.members
    came = any(join.inc in state.members for join in preparing.joins)
    if preparing.soft and old and not came:
        return ""
    patience_s = state.settings.patience_s
    limit_s = patience_s * (_SLOW if worker.connected and worker.doing.startswith(USER_CODE) else 1)
    waited_s = now_s - preparing.since_s
    if waited_s < limit_s:
        return ""
    if not worker.connected:
        return f"{worker.title} has not come back to the hub within {waited_s:.3g} s (patience_s={patience_s:g})"
    return (
        f"{worker.title} did not come to the new generation within {waited_s:.3g} s (patience_s={patience_s:g})"
        f"{_last_heard(worker)}"
    )


def _stalled(worker: Worker, watched: Sequence[Worker], patience_s: float, now_s: float) -> str:
    """Only where others wait: where all are at the same, nobody is late."""
    doing_s = worker.doing_s + now_s - worker.heard_s
    kind = _kind(worker)
    if not kind or all(_kind(other) == kind for other in watched):
        return ""
    if kind == READING_DATA and doing_s > patience_s:
        return (
            f"data stall: {worker.title} has been reading data for {doing_s:.3g} s at step {worker.step} "
            f"(patience_s={patience_s:g}) while others wait"
        )
    if doing_s > _SLOW * patience_s:
        return (
            f"{worker.title} has been at step {worker.step}, {worker.doing}, for {doing_s:.3g} s "
            f"({_SLOW} x patience_s) while others wait"
        )
    return ""


def _kind(worker: Worker) -> str:
    """What a worker may be late with; others that do the same do not wait for it. Empty: it waits itself."""
    if worker.doing.startswith(READING_DATA):
        return READING_DATA
    if worker.doing.startswith(USER_CODE):
        return "the user's code"
    return "computing" if worker.doing.startswith(_COMPUTING) else ""


def _last_heard(worker: Worker) -> str:
    return f"; last heard at step {worker.step}, {worker.doing}" if worker.doing else ""


def unready(state: HubState) -> frozenset[str]:
    """Return the newcomers of the last generation that have not copied the state yet; none in a first generation."""
    newcomers = joined(state)
    return newcomers - frozenset(state.ready)


def joined(state: HubState) -> frozenset[str]:
    """Return those that came into the last generation as newcomers; none in a first one, where all are new."""
    go = state.go
    if go is None or not go.num_veterans:
        return frozenset()
    return frozenset(member.inc for member in go.members[go.num_veterans :])


def quarrel(state: HubState, fail: Fail, now_s: float) -> tuple[tuple[Quarrel, ...], tuple[str, ...]]:
    """Return all quarrels with this failure noted, and the incarnations that must go now.

    Each pair counts once a generation, and what is ten times the patience old is forgotten. Of a pair, the one goes
    that was a newcomer when they first failed, else the one that more members accuse; between equals the later rank.
    A failure that names nobody is the newcomers' that have not copied the state yet, where there are such.
    """
    window_s = _SLOW * state.settings.patience_s
    kept = [each for each in state.quarrels if now_s - each.at_s <= window_s]
    known = fail.suspect in state.members and fail.suspect != fail.inc
    new = unready(state)
    if not known and new:
        blamed = []
        for inc in sorted(new):
            kept, accusations = _noted(kept, ("", inc), inc, fail.generation, now_s)
            if accusations >= _QUARRELS:
                blamed.append(inc)
        return tuple(kept), tuple(blamed)
    accused = fail.suspect if known else ""
    pair = (min(fail.inc, accused), max(fail.inc, accused))
    newer = [inc for inc in pair if inc in joined(state)]
    kept, accusations = _noted(kept, pair, accused, fail.generation, now_s, newer[0] if len(newer) == 1 else "")
    if not known:
        by_others = any(each.pair[0] == "" and each.pair != pair for each in kept)
        return tuple(kept), (fail.inc,) if accusations >= _ALONE and not by_others else ()
    if accusations < _QUARRELS:
        return tuple(kept), ()
    noted = next(each for each in kept if each.pair == pair)
    votes = [name for each in kept for name in each.accused]
    return tuple(kept), (noted.newer or max(pair, key=lambda inc: (votes.count(inc), state.members.index(inc))),)


def _noted(
    kept: list[Quarrel], pair: tuple[str, str], accused: str, generation: int, now_s: float, newer: str = ""
) -> tuple[list[Quarrel], int]:
    """All quarrels with this one, and how often this pair has failed; 0 where it is known for this generation."""
    old = next((each for each in kept if each.pair == pair), None)
    if old is not None and old.generation == generation:
        return kept, 0
    accusations = (*(() if old is None else old.accused), accused)[-_ALONE:]
    note = Quarrel(
        pair=pair,
        accused=accusations,
        generation=generation,
        at_s=now_s,
        newer=newer if old is None else old.newer or newer,
    )
    return [*(each for each in kept if each.pair != pair), note][-QUARRELS_LIMIT:], len(accusations)
