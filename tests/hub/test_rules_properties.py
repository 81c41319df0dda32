"""Whatever workers send, in whatever order: the hub stays sane, small, and writes down before it speaks."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.hub.scripted_hub import SETTINGS, member

from ragtag.hub.frames import (
    Beat,
    Checkpointed,
    Described,
    Fail,
    Go,
    Hello,
    Join,
    Leave,
    Ready,
    Refused,
    Started,
    Trouble,
)
from ragtag.hub.rules import advance, restore
from ragtag.hub.rules_limits import DIGESTS_LIMIT, QUARRELS_LIMIT, TEXT_LIMIT, WORKERS_LIMIT, absurd
from ragtag.hub.rules_state import Closed, GoRecord, Journal, ReadyRecord, Received, Restarted, Send, Tick

INCS = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.integers(0, 3)
DIGESTS = st.sampled_from(["", "x", "y"])
NEAR = st.integers(0, 3)
"""Generations back from the one announced last."""


def _event(inc, kind, back, step, digest, held, flag, other):
    def build(state):
        generation = max(state.generation - back, 0)
        preparing = state.preparing.generation if state.preparing is not None else generation
        frame = {
            "hello": lambda: Hello(run="run", version="1", member=member(inc), generation=generation, has_state=flag),
            "join": lambda: Join(
                generation=preparing if back else generation,
                inc=inc,
                has_state=flag,
                applied=step,
                applied_digest=digest,
                held_digest=held,
            ),
            "fail": lambda: Fail(generation=generation, inc=inc, reason="r" * 9000, suspect=other),
            "beat": lambda: Beat(generation=generation, inc=inc, step=step, doing="reading data", doing_s=40.0 * flag),
            "ready": lambda: Ready(generation=generation, inc=inc),
            "trouble": lambda: Trouble(generation=generation, inc=inc, step=step, text="t"),
            "leave": lambda: Leave(generation=generation, inc=inc),
            "described": lambda: Described(generation=generation, inc=inc, description="d"),
            "checkpointed": lambda: Checkpointed(generation=generation, inc=inc, step=step, name="n"),
        }
        if kind == "closed":
            return Closed(inc=inc)
        return Tick() if kind == "tick" else Received(inc=inc, frame=frame[kind]())

    return build


KINDS = ["hello"] * 4 + ["join"] * 6 + ["fail", "beat", "ready", "ready", "leave", "described", "checkpointed"]
EVENTS = st.builds(
    _event,
    INCS,
    st.sampled_from([*KINDS, "closed", "tick", "tick", "trouble"]),
    NEAR,
    STEPS,
    DIGESTS,
    DIGESTS,
    st.booleans(),
    INCS,
)


@settings(max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.0, 1.0, 20.0, 400.0])), max_size=60))
def test_any_sequence_of_events_keeps_the_invariants(events):
    state, effects = advance(restore((), SETTINGS), Restarted(), 0.0)
    records = [effect.record for effect in effects if isinstance(effect, Journal)]
    now_s = 0.0
    connected = set()
    for build, passed_s in events:
        now_s += passed_s
        event = build(state)
        before = state
        if isinstance(event, Received):
            connected.add(event.inc)
        elif isinstance(event, Closed):
            connected.discard(event.inc)
        state, effects = advance(state, event, now_s)
        written = [effect.record for effect in effects if isinstance(effect, Journal)]
        for number, effect in enumerate(effects):
            if isinstance(effect, Send):
                assert effect.inc in connected
                if isinstance(effect.frame, Go | Started) and effect.frame.generation > 0:
                    earlier = [*records, *(each.record for each in effects[:number] if isinstance(each, Journal))]
                    kind = GoRecord if isinstance(effect.frame, Go) else ReadyRecord
                    assert any(isinstance(record, kind) for record in earlier)
        records += written
        generations = [record.go.generation for record in records if isinstance(record, GoRecord)]
        assert generations == sorted(set(generations))
        if state.go is not None and state.go is not before.go:
            go = state.go
            assert len({each.inc for each in go.members}) == len(go.members) > 0
            assert all(each.inc in connected for each in go.members)
            assert (go.action == "start") == (go.num_veterans == 0)
            if before.started:
                assert go.num_veterans > 0
                assert before.go is not None
                old = [each.inc for each in before.go.members]
                ranks = [old.index(each.inc) for each in go.members[: go.num_veterans]]
                assert ranks == sorted(ranks)
        assert len(state.workers) <= 8
        assert max((len(worker.suspicion) for worker in state.workers), default=0) <= TEXT_LIMIT
        if before.end is not None:
            assert state.end == before.end
            assert not written
    restored = restore(records, SETTINGS)
    for name in ("epoch", "go", "started", "description", "checkpoint", "checkpoint_step", "end"):
        assert getattr(restored, name) == getattr(state, name)


def test_what_workers_can_make_the_hub_remember_is_bounded():
    state, _ = advance(restore((), SETTINGS), Restarted(), 0.0)
    for inc in ("a", "b"):
        state, _ = advance(state, Received(inc=inc, frame=_hello(inc, 2)), 0.0)
    for inc in ("a", "b"):
        assert state.preparing is not None
        join = Join(generation=state.preparing.generation, inc=inc, has_state=False)
        state, _ = advance(state, Received(inc=inc, frame=join), 0.0)
    for step in range(1, 3 * DIGESTS_LIMIT):
        beat = Beat(generation=1, inc="a", step=step, doing="d", doing_s=0.0, applied=step, applied_digest="x")
        state, _ = advance(state, Received(inc="a", frame=beat), 0.0)
    assert len(state.digests) == DIGESTS_LIMIT
    assert state.go is not None
    for number in range(3 * QUARRELS_LIMIT):
        fail = Fail(generation=state.go.generation, inc="a", reason="", suspect=f"nobody {number}")
        state, _ = advance(state, Received(inc="a", frame=fail), 0.0)
    assert len(state.quarrels) <= QUARRELS_LIMIT


def _hello(inc, expected=1, **more):
    return Hello(run="run", version="1", member=member(inc, **more), generation=0, has_state=False, expected=expected)


def test_the_number_of_workers_is_bounded():
    state, _ = advance(restore((), SETTINGS), Restarted(), 0.0)
    crowd = tuple(
        advance(state, Received(inc=f"w{n}", frame=_hello(f"w{n}", 9)), 0.0)[0].workers[0] for n in range(WORKERS_LIMIT)
    )
    full, effects = advance(replace(state, workers=crowd), Received(inc="more", frame=_hello("more")), 0.0)
    assert len(full.workers) == WORKERS_LIMIT
    refused = [each.frame for each in effects if isinstance(each, Send) and isinstance(each.frame, Refused)]
    assert [f"{WORKERS_LIMIT} workers are in this run already" in each.reason for each in refused] == [True]


def test_absurd_frames_change_nothing():
    state, _ = advance(restore((), SETTINGS), Restarted(), 0.0)
    state, _ = advance(state, Received(inc="a", frame=_hello("a", 2)), 0.0)
    long = "x" * 300
    for frame in (
        _hello(long),
        _hello(""),
        _hello("a", 0),
        _hello("a", local_rank=-1),
        Join(generation=-1, inc="a", has_state=True),
        Join(generation=1, inc="a", has_state=True, held_digest=long),
        Fail(generation=1, inc="a", reason="", suspect=long),
        Beat(generation=1, inc="a", step=1, doing=long, doing_s=0.0),
        Beat(generation=1, inc="a", step=1, doing="d", doing_s=float("nan")),
        Beat(generation=1, inc="a", step=1 << 60, doing="d", doing_s=0.0),
        Checkpointed(generation=1, inc="a", step=1, name="x" * 5000),
        Described(generation=1, inc="a", description="x" * (1 << 21)),
        Leave(generation=1, inc="another"),
    ):
        assert absurd(frame) or isinstance(frame, Leave)
        inc = frame.member.inc if isinstance(frame, Hello) else "a"
        after, effects = advance(state, Received(inc=inc, frame=frame), 0.0)
        assert after == state
        assert not any(isinstance(each, Send) for each in effects)
