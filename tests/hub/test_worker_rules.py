"""What one worker makes of the hub's frames."""

import pytest
from msgspec.structs import replace
from tests.hub.scripted_hub import member

from ragtag.hub.frames import Go, Prep, Started
from ragtag.hub.worker_rules import (
    WorkerState,
    apply_held,
    at_boundary,
    copied,
    digest,
    hold,
    may_vote,
    on_failure,
    on_go,
    on_prep,
    on_started,
)


def prep(generation, members="ab", *, soft=False):
    return Prep(generation=generation, members=tuple(members), soft=soft, reason="")


def go(generation, members="ab", veterans=2, base=4, action="redo"):
    people = tuple(member(inc) for inc in members)
    return Go(generation=generation, members=people, num_veterans=veterans, base=base, action=action, reason="")


VETERAN = WorkerState(
    inc="a", seen=7, told=7, group=7, has_state=True, applied=4, applied_digest="four", held_digest="five"
)


def test_a_prep_is_answered_with_all_that_the_hub_needs():
    state, told = on_prep(VETERAN, prep(8), in_call="saving")
    assert told.do == "join"
    assert told.join is not None
    assert (told.join.generation, told.join.applied, told.join.applied_digest, told.join.held_digest) == (
        8,
        4,
        "four",
        "five",
    )
    assert told.join.has_state
    assert told.join.in_call == "saving"
    assert state == replace(VETERAN, seen=8, group=0)


@pytest.mark.parametrize("generation", [6, 7])
def test_an_old_prep_is_dropped(generation):
    assert on_prep(VETERAN, prep(generation))[1].do == "ignore"


def test_a_prep_without_me_stops_me_and_keeps_everything():
    state, told = on_prep(VETERAN, prep(8, "bc"))
    assert told.do == "stop"
    assert state == replace(VETERAN, seen=8, group=0)


def test_a_soft_prep_is_answered_at_the_next_boundary():
    state, told = on_prep(VETERAN, prep(8, soft=True))
    assert (told.do, state.group, state.flagged) == ("flag", 7, 8)
    assert may_vote(state)
    state, told = at_boundary(apply_held(state))
    assert told.join is not None
    assert (told.join.generation, told.join.applied, told.join.applied_digest, told.join.held_digest) == (
        8,
        5,
        "five",
        "",
    )
    assert state.group == 0


def test_a_soft_prep_that_comes_after_the_boundary_is_answered_at_once():
    state, told = at_boundary(apply_held(VETERAN))
    assert told.do == "ignore"
    assert on_prep(state, prep(8, soft=True))[1].do == "join"


def test_a_hard_prep_overtakes_a_soft_one():
    state, _ = on_prep(VETERAN, prep(8, soft=True))
    state, told = on_prep(state, prep(9))
    assert (told.do, told.join and told.join.generation, state.flagged) == ("join", 9, 0)


def test_go_says_apply_or_go_on():
    joined, _ = on_prep(VETERAN, prep(8))
    state, told = on_go(joined, go(8, base=5, action="apply"))
    assert (told.do, told.rank, state.group, state.held_digest) == ("apply", 0, 8, "five")
    assert apply_held(state).applied == 5
    state, told = on_go(joined, go(8, "ba"))
    assert (told.do, told.rank, state.group, state.held_digest, state.applied) == ("go on", 1, 8, "", 4)
    with pytest.raises(AssertionError):
        on_go(replace(joined, held_digest=""), go(8, base=5, action="apply"))


def test_go_without_me_evicts_only_who_has_something_to_wipe():
    assert on_go(VETERAN, go(8, "bc"))[1].do == "evicted"
    state, told = on_go(WorkerState(inc="z"), go(8, "bc"))
    assert (told.do, state.told) == ("wait", 8)


def test_each_generation_is_entered_once():
    joined, _ = on_prep(VETERAN, prep(8))
    inside, _ = on_go(joined, go(8))
    assert on_go(inside, go(8))[1].do == "ignore"
    assert on_go(on_failure(inside), go(8))[1].do == "ignore"
    newer, _ = on_prep(inside, prep(9))
    assert on_go(newer, go(8))[1].do == "ignore"


def test_a_newcomer_copies_and_forgets_what_it_had():
    joined, _ = on_prep(VETERAN, prep(8))
    state, told = on_go(joined, go(8, "ba", veterans=1))
    assert told.do == "copy"
    assert not state.has_state
    assert not may_vote(state)
    state = copied(state, 4, "four")
    assert (state.has_state, state.applied, state.held_digest) == (True, 4, "")


def test_nobody_votes_in_a_first_generation_before_it_has_started():
    state, told = on_go(WorkerState(inc="b"), go(8, veterans=0, base=0, action="start"))
    assert told.do == "begin"
    state = hold(copied(state, 0, ""), "one")
    assert not may_vote(state)
    assert not may_vote(on_started(state, Started(generation=7)))
    assert may_vote(on_started(state, Started(generation=8)))


def test_digests_differ_wherever_gradients_may():
    first = (8, 5, 123, 16.0, False)
    others = [(9, 5, 123, 16.0, False), (8, 6, 123, 16.0, False), (8, 5, 124, 16.0, False), (8, 5, 123, 17.0, False)]
    assert len({digest(*each) for each in [first, *others, (8, 5, 123, 16.0, True)]}) == 6
    assert digest(*first) == digest(*first)
    assert len(digest(*first)) == 16
