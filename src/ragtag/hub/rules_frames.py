"""What the hub makes of each frame that a worker sends.

The one idea: a frame only changes what is known; what follows from that is `rules_forming.go_on`'s business. Whatever
speaks for another incarnation or generation than the current one is dropped.
"""

from msgspec.structs import replace

from ragtag.hub.frames import (
    Beat,
    Checkpointed,
    Described,
    End,
    Fail,
    FromWorker,
    Hello,
    Join,
    Leave,
    Pointed,
    Ready,
    Refused,
    Started,
    Trouble,
    Welcome,
)
from ragtag.hub.rules_forming import announce, prep, trusted
from ragtag.hub.rules_limits import DIGESTS_LIMIT, WORKERS_LIMIT, absurd, cut
from ragtag.hub.rules_reach import unreachable
from ragtag.hub.rules_state import DescribedRecord, PointerRecord, Preparing, ReadyRecord, Send, Worker
from ragtag.hub.rules_suspicion import quarrel, unready
from ragtag.hub.rules_turn import Turn


def receive(turn: Turn, inc: str, frame: FromWorker) -> None:
    """Take in one frame of worker `inc`."""
    wrong = absurd(frame)
    speaker = frame.member.inc if isinstance(frame, Hello) else frame.inc
    if not wrong and speaker != inc:
        wrong = "another worker's incarnation"
    if wrong:
        turn.log(f"a {type(frame).__name__} of {inc[:64]!r} with {wrong[:300]} was dropped", "warning")
        turn.close(inc, f"a frame with {wrong[:300]}")
        return
    if isinstance(frame, Hello):
        _hello(turn, frame)
        return
    worker = turn.state.worker(inc)
    if worker is None:
        turn.close(inc, "not known here; say Hello first")
        return
    turn.set_worker(inc, heard_s=turn.now_s, suspicion=worker.suspicion if inc in turn.state.members else "")
    if turn.state.end is not None:
        if isinstance(frame, Leave):
            turn.set_worker(inc, left=True)
    elif isinstance(frame, Beat):
        _beat(turn, worker, frame)
    elif isinstance(frame, Join):
        _join(turn, frame)
    elif isinstance(frame, Fail):
        _fail(turn, worker, frame)
    elif isinstance(frame, Ready):
        _ready(turn, frame)
    elif isinstance(frame, Trouble):
        _trouble(turn, worker, frame)
    elif isinstance(frame, Leave):
        _leave(turn, worker)
    elif isinstance(frame, Described):
        if _is_current(turn, frame) and not turn.state.description and frame.description:
            turn.journal(DescribedRecord(description=frame.description))
            turn.set(description=frame.description)
    elif isinstance(frame, Checkpointed):
        _checkpointed(turn, frame)


def _is_current(turn: Turn, frame: Ready | Described | Fail | Checkpointed | Beat) -> bool:
    """Whether the frame speaks for the last generation, as one of its members."""
    go = turn.state.go
    return go is not None and frame.generation == go.generation and frame.inc in turn.state.members


def _hello(turn: Turn, hello: Hello) -> None:
    state, member, go = turn.state, hello.member, turn.state.go
    settings = state.settings
    known = state.worker(member.inc)
    refusal = ""
    if hello.run != settings.run:
        refusal = f"this is the hub of run {settings.run!r}, and it speaks for run {hello.run!r}"
    elif hello.version != settings.version:
        refusal = f"it runs ragtag {hello.version}, this run ragtag {settings.version}; install that version there"
    elif known is None and len(state.workers) >= WORKERS_LIMIT:
        refusal = f"{WORKERS_LIMIT} workers are in this run already"
    elif known is None and state.end is None:
        refusal = unreachable(state, member)
    if refusal:
        turn.log(f"{member.name} ({member.host}) was refused: {refusal}", "warning")
        _answer(turn, member.inc, Refused(reason=refusal))
        turn.close(member.inc, refusal)
        return
    if state.end is not None:
        _answer(turn, member.inc, state.end)
        return
    if hello.generation > state.generation or (go is None and hello.has_state):
        reason = (
            f"{member.name} ({member.host}) comes from generation {hello.generation}, of which this hub's journal "
            f"knows nothing: the hub has lost its run directory. Start the run again; it continues from its last "
            f"checkpoint."
        )
        turn.log(reason, "warning")
        _answer(turn, member.inc, End(reason=reason, origin=member.name))
        turn.close(member.inc, reason)
        return
    inside = member.inc in state.members
    stale = go is not None and hello.generation < go.generation
    worker = Worker(
        member=member,
        expected=hello.expected,
        generation=hello.generation,
        heard_s=turn.now_s,
        left=known is not None and known.left,
        left_out=not inside and (hello.has_state or (known is not None and known.left_out and stale)),
    )
    if known is None:
        turn.set(workers=(*state.workers, worker), arrived_s=turn.now_s)
        turn.log(f"{worker.title} has come", "debug")
    else:
        turn.set(workers=tuple(worker if each.inc == member.inc else each for each in state.workers))
    turn.send(
        member.inc,
        Welcome(
            epoch=state.epoch,
            patience_s=settings.patience_s,
            description=state.description,
            checkpoint=state.checkpoint,
        ),
    )
    if go is not None and (inside or worker.left_out):
        # It may have seen the Prep of this generation and not its Go; a worker enters each once.
        turn.send(member.inc, go)
    preparing = state.preparing
    if known is None:
        return
    if not inside:
        if preparing is not None and member.inc in preparing.members:
            # Its announcement or its answer may be lost: it is asked again, under another number.
            _ask_again(turn, preparing, member.inc)
        return
    if state.started and go is not None and go.action == "start":
        turn.send(member.inc, Started(generation=go.generation))
    if known.left:
        return
    if known.connected or known.suspicion or preparing is None or preparing.last_chance:
        # What was under way on the old connection is lost, an answer or a failure among it: all are asked again.
        announce(turn, f"{worker.title} has connected again")
    else:
        turn.send(member.inc, prep(preparing))


def _ask_again(turn: Turn, preparing: Preparing, newcomer: str) -> None:
    if not turn.state.started:
        announce(turn, f"{turn.worker(newcomer).title} has connected again")
        return
    members = tuple(inc for inc in preparing.members if inc != newcomer)
    joins = tuple(join for join in preparing.joins if join.inc != newcomer)
    turn.set(preparing=replace(preparing, members=members, joins=joins))


def _answer(turn: Turn, inc: str, frame: Refused | End) -> None:
    """Send to a worker that is not, or need not be, taken in."""
    turn.effects.append(Send(inc=inc, frame=frame))


def _beat(turn: Turn, worker: Worker, beat: Beat) -> None:
    turn.set_worker(
        worker.inc,
        generation=max(worker.generation, beat.generation),
        step=beat.step,
        doing=beat.doing,
        doing_s=beat.doing_s,
    )
    go = turn.state.go
    if worker.left_out and go is not None and beat.generation >= go.generation and worker.inc not in turn.state.members:
        # It has seen that it was left out and is still here: it held no state, and waits.
        turn.set_worker(worker.inc, left_out=False)
    if worker.inc not in turn.state.members or not beat.applied_digest:
        return
    if not turn.state.started and _is_current(turn, beat):
        _start(turn)
    known = dict(turn.state.digests)
    first = known.get(beat.applied)
    if first is None:
        turn.set(digests=(*turn.state.digests, (beat.applied, beat.applied_digest))[-DIGESTS_LIMIT:])
    elif first != beat.applied_digest:
        turn.end(
            f"{worker.title} applied another gradient for step {beat.applied} than was reported before: replicas have "
            f"drifted apart. Start the run again; it continues from its last checkpoint.",
            origin=worker.member.name,
        )


def _join(turn: Turn, join: Join) -> None:
    preparing = turn.state.preparing
    if preparing is None or join.generation != preparing.generation or join.inc not in preparing.members:
        return
    old = turn.state.members
    first = preparing.soft and join.inc in old and not any(other.inc in old for other in preparing.joins)
    joins = (*(other for other in preparing.joins if other.inc != join.inc), join)
    came_s = preparing.came_s
    if came_s is None and preparing.last_chance and join.has_state and join.inc in old:
        came_s = turn.now_s
    turn.set(
        preparing=replace(
            preparing,
            joins=tuple(sorted(joins, key=lambda each: each.inc)),
            since_s=turn.now_s if first else preparing.since_s,
            came_s=came_s,
        )
    )


def _fail(turn: Turn, worker: Worker, fail: Fail) -> None:
    if not _is_current(turn, fail) or not trusted(turn, fail.inc):
        return
    quarrels, blamed = quarrel(turn.state, fail, turn.now_s)
    turn.set(quarrels=quarrels)
    said = reason = f"{worker.title}: {cut(fail.reason)}"
    named = fail.suspect in turn.state.members
    for inc in (inc for inc in blamed if trusted(turn, inc)):
        if not named and inc in unready(turn.state):
            what = "has joined, and generations with it fail time and again"
        else:
            alone = inc == fail.inc and not named
            what = "fails again and again on its own" if alone else "cannot be reached by other members, time and again"
        reason = f"{turn.worker(inc).title} {what}; {said}"
        turn.suspect(inc, reason)
    preparing = turn.state.preparing
    if preparing is None or preparing.soft:
        announce(turn, reason, after_failure=True)


def _ready(turn: Turn, ready: Ready) -> None:
    if not _is_current(turn, ready) or ready.inc in turn.state.ready:
        return
    turn.set(ready=tuple(sorted((*turn.state.ready, ready.inc))))
    if not turn.state.started and set(turn.state.ready) == set(turn.state.members):
        _start(turn)


def _start(turn: Turn) -> None:
    """From now on the state exists, and is never made anew."""
    go = turn.state.go
    assert go is not None
    turn.journal(ReadyRecord(generation=go.generation))
    turn.set(started=True)
    for inc in turn.state.members:
        turn.send(inc, Started(generation=go.generation))


def _trouble(turn: Turn, worker: Worker, trouble: Trouble) -> None:
    if turn.state.go is None or (worker.inc in turn.state.members and trusted(turn, worker.inc)):
        turn.end(trouble.text, origin=worker.member.name, told=True)
    else:
        turn.log(f"{worker.title}, which is not in the run, failed: {trouble.text}", "warning")
        turn.set_worker(worker.inc, left=True)


def _leave(turn: Turn, worker: Worker) -> None:
    turn.set_worker(worker.inc, left=True)
    turn.log(f"{worker.title} has left", "debug")


def _checkpointed(turn: Turn, frame: Checkpointed) -> None:
    state = turn.state
    reason = ""
    if not _is_current(turn, frame):
        reason = f"generation {frame.generation} is not the current one"
    elif not state.started:
        reason = "the run has not started"
    elif frame.step <= state.checkpoint_step:
        reason = f"the run's checkpoint is of step {state.checkpoint_step} already"
    if not reason:
        turn.journal(PointerRecord(step=frame.step, name=frame.name))
        turn.set(checkpoint_step=frame.step, checkpoint=frame.name)
    # All members, since whoever ends names the last checkpoint.
    for inc in (frame.inc,) if reason else state.members:
        turn.send(inc, Pointed(step=frame.step, name=frame.name, moved=not reason, reason=reason))
