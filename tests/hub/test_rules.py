"""The hub's rules, walked by hand: what each event leads to, and in which words."""

import pytest
from msgspec.structs import replace
from tests.hub.scripted_hub import SETTINGS, Script, incs

from ragtag.core.errors import LaunchError
from ragtag.hub.frames import Checkpointed, Described, End, Go, Pointed, Prep, Ready, Refused, Started, Trouble, Welcome
from ragtag.hub.rules import restore
from ragtag.hub.rules_forming import FRUITLESS_LIMIT
from ragtag.hub.rules_state import CloseConnection, GoRecord, Journal, Send

# First generation


def test_first_generation_waits_for_all_workers_of_the_machines_that_have_come():
    hub = Script()
    hub.hello("a", expected=2)
    assert hub.state.preparing is None
    hub.hello("c", host="other", expected=2)
    hub.hello("b", expected=2, local_rank=1)
    assert hub.state.preparing is None
    hub.hello("d", host="other", expected=2, local_rank=1)
    assert {inc for inc, _ in hub.sent(Prep)} == {"a", "b", "c", "d"}
    for inc in "dcb":
        hub.join(inc, has_state=False)
    assert hub.state.go is None
    hub.join("a", has_state=False)
    assert (incs(hub.go), hub.go.action, hub.go.num_veterans, hub.go.base) == ("abcd", "start", 0, 0)


def test_first_generation_begins_without_workers_that_never_come():
    hub = Script()
    hub.hello("a", expected=3)
    hub.passes(290, "a")
    assert hub.state.preparing is None
    hub.passes(11, "a")
    hub.join("a", has_state=False)
    assert incs(hub.go) == "a"
    assert "without 2 of the workers" in hub.warnings


def test_a_first_generation_that_fails_starts_again_until_all_its_members_hold_the_state():
    hub = Script()
    for inc in "ab":
        hub.hello(inc, expected=2)
    for inc in "ab":
        hub.join(inc, has_state=False)
    hub.frame("a", Ready(generation=hub.go.generation, inc="a"))
    assert not hub.sent(Started)
    hub.closed("a")
    hub.join("b", has_state=False)
    assert (incs(hub.go), hub.go.action) == ("b", "start")
    hub.closed("b")
    assert hub.state.end is None
    hub.hello("c")
    hub.join("c", has_state=False)
    assert (incs(hub.go), hub.go.action) == ("c", "start")
    hub.frame("c", Ready(generation=hub.go.generation, inc="c"))
    assert [inc for inc, _ in hub.sent(Started)] == ["c"]


def test_a_worker_that_has_made_the_state_is_the_veteran_of_a_first_generation_that_fails():
    hub = Script()
    for inc in "ab":
        hub.hello(inc, expected=2)
    for inc in "ab":
        hub.join(inc, has_state=False)
    hub.fail("b")
    hub.join("b", has_state=False)
    hub.join("a", has_state=True)
    assert (incs(hub.go), hub.go.num_veterans, hub.go.action) == ("ab", 1, "redo")


# Order


@pytest.mark.parametrize("kind", [Go, Started, Pointed, End])
def test_what_is_sent_was_journalled_before(kind):
    hub = Script()
    hub.hello("a")
    hub.join("a", has_state=False)
    hub.frame("a", Ready(generation=hub.go.generation, inc="a"))
    hub.frame("a", Checkpointed(generation=hub.go.generation, inc="a", step=3, name="three"))
    hub.frame("a", Trouble(generation=hub.go.generation, inc="a", step=3, text="boom"))
    number = next(n for n, each in enumerate(hub.effects) if isinstance(each, Send) and isinstance(each.frame, kind))
    record = {"Go": "GoRecord", "Started": "ReadyRecord", "Pointed": "PointerRecord", "End": "EndRecord"}[kind.__name__]
    written = [type(each.record).__name__ for each in hub.effects[:number] if isinstance(each, Journal)]
    assert written.count(record) == 1


# Losses


def test_a_closed_connection_forms_the_next_generation_at_once():
    hub = Script().trained("abc")
    hub.closed("b")
    assert {inc for inc, _ in hub.sent(Prep)} == {"a", "c"}
    assert hub.prep.members == ("a", "c")
    assert "gpu-b (box) is gone" in hub.prep.reason
    assert not hub.prep.soft
    hub.join("c", applied=4, applied_digest="four")
    hub.join("a", applied=4, applied_digest="four")
    assert (incs(hub.go), hub.go.num_veterans, hub.go.base, hub.go.action) == ("ac", 2, 4, "redo")


def test_a_silent_member_is_suspected_two_beats_before_the_patience_ends():
    hub = Script().trained("ab")
    hub.passes(25, "a")
    assert hub.state.preparing is None
    hub.passes(2, "a")
    assert hub.prep.members == ("a",)
    assert "no sign of life from gpu-b (box) for 26 s (patience_s=30)" in hub.prep.reason
    hub.join("a")
    assert incs(hub.go) == "a"
    assert ("b", hub.go) in hub.sent(Go)


def test_a_data_stall_is_named_once_others_wait_for_it():
    hub = Script().trained("ab")
    hub.beat("a", "reading data", 31.0)
    hub.beat("b", "reading data", 31.0)
    hub.passes(1)
    assert hub.state.preparing is None
    hub.beat("a", "reducing gradients", 5.0)
    hub.passes(1)
    assert hub.prep.members == ("a",)
    assert "data stall: gpu-b (box) has been reading data for 33 s at step 1" in hub.prep.reason


def test_the_users_code_gets_ten_times_the_patience():
    hub = Script().trained("ab")
    hub.beat("a", "reducing gradients", 290.0)
    hub.beat("b", "your code", 290.0)
    hub.passes(9)
    assert hub.state.preparing is None
    hub.passes(2)
    assert hub.prep.members == ("a",)
    assert "gpu-b (box) has been at step 1, your code, for 301 s" in hub.prep.reason
    hub = Script().trained("ab")
    for inc in "ab":
        hub.beat(inc, "your code", 290.0)
    hub.passes(11)
    assert hub.state.preparing is None


@pytest.mark.parametrize(
    ("doing", "seconds"), [("forward and backward", 30), ("your code", 300), ("writing the checkpoint x", 300)]
)
def test_a_member_that_does_not_come_is_given_up(doing, seconds):
    hub = Script().trained("abc")
    hub.closed("c")
    hub.join("a")
    hub.passes(seconds - 1, "ab", doing=doing)
    assert hub.prep.members == ("a", "b")
    hub.passes(1, "ab", doing=doing)
    assert hub.prep.members == ("a",)
    assert "gpu-b (box) did not come to the new generation" in hub.prep.reason


def test_of_a_pair_that_fails_twice_one_must_go():
    hub = Script().trained("abc")
    hub.fail("a", suspect="c")
    hub.fail("c", suspect="a")
    for inc in "abc":
        hub.join(inc)
    assert incs(hub.go) == "abc"
    hub.fail("b", suspect="c")
    for inc in "abc":
        hub.join(inc)
    assert incs(hub.go) == "abc"
    hub.fail("c", suspect="a")
    assert hub.prep.members == ("a", "b")
    assert "gpu-c (box) cannot be reached" in hub.prep.reason


def test_generations_that_all_fail_without_a_step_end_the_run():
    hub = Script().trained("ab")
    for _ in range(FRUITLESS_LIMIT + 1):
        if hub.state.end is not None:
            break
        hub.now_s += 400  # so that no quarrel is remembered
        for inc in "ab":
            hub.beat(inc)
        hub.fail("a")
        for inc in "ab":
            hub.join(inc)
    assert hub.state.end is not None
    assert "10 generations in a row failed before step 1 was applied" in hub.state.end.reason
    assert "broken" in hub.state.end.reason


def test_failures_of_older_generations_and_of_suspects_change_nothing():
    hub = Script().trained("abc")
    old = hub.go.generation
    hub.closed("c")
    for inc in "ab":
        hub.join(inc)
    before = hub.state
    hub.fail("c", suspect="a")
    hub.frame("a", replace(Ready(generation=old, inc="a")))
    assert hub.state == before


# Newcomers


def test_members_are_interrupted_only_when_a_newcomer_answers():
    hub = Script().trained("ab")
    hub.hello("c", host="new")
    assert [inc for inc, _ in hub.sent(Prep)] == ["c"]
    hub.join("c", has_state=False)
    assert [inc for inc, _ in hub.sent(Prep)] == ["c", "a", "b"]
    assert hub.prep.soft
    assert hub.prep.reason == "gpu-c (new) joins"
    hub.passes(500, "abc", doing="forward and backward")
    assert hub.state.preparing is not None
    for inc in "ab":
        hub.join(inc, applied=7, applied_digest="seven")
    assert (incs(hub.go), hub.go.num_veterans, hub.go.base, hub.go.action) == ("abc", 2, 7, "redo")


def test_a_newcomer_that_does_not_answer_disturbs_nobody():
    hub = Script().trained("ab")
    hub.hello("c")
    hub.passes(31, "abc")
    assert [inc for inc, _ in hub.sent(Prep) if inc != "c"] == []
    hub.closed("c")
    assert hub.state.preparing is None


def test_newcomers_wait_while_a_veteran_is_in_a_call():
    hub = Script().trained("ab")
    hub.hello("c")
    hub.join("c", has_state=False)
    hub.fail("a")
    assert not hub.prep.soft
    hub.join("c", has_state=False)
    hub.join("a", in_call="evaluating")
    hub.join("b", in_call="evaluating")
    assert incs(hub.go) == "ab"
    assert not hub.sent(Go) or "c" not in [inc for inc, _ in hub.sent(Go)]
    hub.join("c", has_state=False)
    for inc in "ab":
        hub.join(inc)
    assert incs(hub.go) == "abc"


def test_a_loss_takes_newcomers_along_that_have_answered_and_waits_for_no_other():
    hub = Script().trained("abx")
    hub.hello("c")
    hub.hello("d")
    hub.closed("x")
    hub.join("c", has_state=False)
    hub.join("a")
    hub.join("b")
    assert incs(hub.go) == "abc"
    assert hub.prep.members == ("a", "b", "c", "d")
    assert hub.prep.soft


def test_welcome_tells_a_newcomer_what_is_trained():
    hub = Script().trained("a")
    hub.frame("a", Described(generation=hub.go.generation, inc="a", description="mlp"))
    hub.frame("a", Described(generation=hub.go.generation, inc="a", description="cnn"))
    hub.hello("b")
    assert hub.sent(Welcome)[-1] == ("b", Welcome(epoch=1, patience_s=30.0, description="mlp"))


# Commit


def test_held_gradients_decide_what_a_generation_does():
    for joins, action, base in [
        ([(4, "four", "five"), (4, "four", "five")], "apply", 5),
        ([(4, "four", "five"), (4, "four", "")], "redo", 4),
        ([(5, "five", ""), (4, "four", "five")], "apply", 5),
        ([(4, "four", "five"), (4, "four", "other")], "redo", 4),
    ]:
        hub = Script().trained("abc")
        hub.closed("c")
        for inc, (applied, applied_digest, held) in zip("ab", joins, strict=True):
            hub.join(inc, applied=applied, applied_digest=applied_digest, held_digest=held)
        assert (hub.go.action, hub.go.base, hub.go.num_veterans) == (action, base, 2)


def test_a_veteran_that_cannot_catch_up_copies_like_a_newcomer():
    hub = Script().trained("abc")
    hub.closed("c")
    hub.join("a", applied=4, applied_digest="four", held_digest="wrong")
    hub.join("b", applied=5, applied_digest="five")
    assert (incs(hub.go), hub.go.num_veterans, hub.go.action, hub.go.base) == ("ba", 1, "redo", 5)


def test_replicas_that_drifted_apart_end_the_run():
    hub = Script().trained("ab")
    hub.beat("a", applied=3, applied_digest="three")
    hub.beat("b", applied=2, applied_digest="two")
    assert hub.state.end is None
    hub.beat("b", applied=3, applied_digest="drei")
    assert "gpu-b (box) applied another gradient for step 3" in hub.sent(End)[0][1].reason
    hub = Script().trained("abc")
    hub.closed("c")
    hub.join("a", applied=3, applied_digest="three")
    hub.join("b", applied=3, applied_digest="drei")
    assert "different gradients for step 3" in hub.sent(End)[0][1].reason


# Nobody left, and everybody through


def test_a_suspected_member_is_taken_back_where_nobody_else_holds_the_state():
    hub = Script().trained("a")
    hub.hello("b")
    hub.passes(31, "b")
    assert "a" in hub.prep.members
    hub.join("b", has_state=False)
    hub.join("a", applied=4, applied_digest="four")
    assert (incs(hub.go), hub.go.num_veterans) == ("ab", 1)


def test_without_a_veteran_the_run_ends_after_the_patience_with_one_named_error():
    hub = Script().trained("ab")
    hub.frame("a", Checkpointed(generation=hub.go.generation, inc="a", step=3, name="run-3.safetensors"))
    hub.hello("c")
    hub.closed("a")
    hub.closed("b")
    hub.join("c", has_state=False)
    hub.passes(29, "c")
    assert hub.state.end is None
    hub.passes(2, "c")
    ((inc, end),) = hub.sent(End)
    assert inc == "c"
    assert end.failed
    for part in ("no worker that holds the run's state is left", "gpu-a (box)", "run-3.safetensors (step 3)"):
        assert part in end.reason
    hub.hello("d")
    assert hub.sent(End)[-1][0] == "d"


def test_a_member_that_connects_again_in_time_is_in():
    hub = Script().trained("a")
    hub.closed("a")
    hub.passes(20)
    hub.hello("a", generation=hub.go.generation, has_state=True)
    hub.join("a", applied=4, applied_digest="four")
    assert (incs(hub.go), hub.go.base, hub.state.end) == ("a", 4, None)


def test_a_failing_script_ends_the_run_everywhere():
    hub = Script().trained("ab")
    hub.frame("b", Trouble(generation=hub.go.generation, inc="b", step=4, text="ValueError: boom"))
    assert [(inc, end.reason, end.origin) for inc, end in hub.sent(End)] == [
        (inc, "ValueError: boom", "gpu-b") for inc in "ab"
    ]


def test_a_newcomers_failing_script_is_its_own():
    hub = Script().trained("a")
    hub.hello("b")
    hub.frame("b", Trouble(generation=0, inc="b", step=0, text="boom"))
    assert hub.state.end is None
    assert hub.state.preparing is None
    assert "boom" in hub.warnings


def test_the_run_ends_well_when_all_have_left_and_goes_on_while_some_have():
    hub = Script().trained("ab")
    hub.leave("a")
    hub.closed("a")
    hub.passes(400, "b")
    assert hub.state.end is None
    assert hub.state.preparing is None
    hub.leave("b")
    assert hub.state.end is not None
    assert not hub.state.end.failed


def test_after_some_have_left_the_others_may_still_need_a_generation():
    hub = Script().trained("abc")
    hub.leave("a")
    hub.fail("b", suspect="a")
    assert hub.prep.members == ("b", "c")
    hub.leave("c")
    assert hub.prep.members == ("b",)
    hub.join("b", applied=4, applied_digest="four", held_digest="five")
    assert (incs(hub.go), hub.go.action, hub.go.base) == ("b", "apply", 5)


# Zombies


def test_an_evicted_worker_is_told_so_when_it_comes_back():
    hub = Script().trained("ab")
    old = hub.go.generation
    hub.closed("b")
    hub.join("a")
    assert hub.state.worker("b") is None
    hub.effects.clear()
    hub.hello("b", generation=old, has_state=True)
    assert hub.sent(Go) == [("b", hub.go)]
    assert hub.state.preparing is None
    hub.beat("b", generation=old)
    assert hub.state.preparing is None


def test_a_worker_left_out_without_state_waits_for_the_next_generation():
    hub = Script().trained("a")
    hub.hello("b")
    hub.join("b", has_state=False)
    hub.join("a")
    assert incs(hub.go) == "ab"
    hub.passes(27, "a")
    hub.join("a")
    assert incs(hub.go) == "a"
    assert hub.state.preparing is None
    hub.beat("b", generation=hub.go.generation)
    assert hub.prep.members == ("a", "b")


def test_the_pointer_moves_forward_and_for_the_current_generation_only():
    hub = Script().trained("ab")
    old = hub.go.generation
    hub.frame("a", Checkpointed(generation=old, inc="a", step=5, name="five"))
    hub.frame("a", Checkpointed(generation=old, inc="a", step=5, name="again"))
    hub.passes(27, "a")
    hub.join("a")
    hub.frame("b", Checkpointed(generation=old, inc="b", step=9, name="zombie"))
    told = [(inc, frame.moved) for inc, frame in hub.sent(Pointed)]
    assert told == [("a", True), ("b", True), ("a", False), ("b", False)]
    assert (hub.state.checkpoint_step, hub.state.checkpoint) == (5, "five")


# Restarts


def test_a_restarted_hub_asks_all_members_again_under_new_numbers():
    hub = Script().trained("ab")
    before = hub.go
    hub = Script(tuple(hub.records))
    assert hub.state.preparing is not None
    assert hub.state.preparing.generation > before.generation + 100_000
    hub.hello("b", generation=before.generation, has_state=True)
    hub.hello("a", generation=before.generation, has_state=True)
    assert hub.sent(Prep) == [("b", hub.prep), ("a", hub.prep)]
    for inc in "ab":
        hub.join(inc, applied=4, applied_digest="four")
    assert (incs(hub.go), hub.go.num_veterans, hub.go.base) == ("ab", 2, 4)


def test_a_restarted_hub_waits_for_its_members_within_the_patience():
    hub = Script(tuple(Script().trained("ab").records))
    hub.hello("b", has_state=True)
    hub.join("b")
    hub.passes(29, "b")
    assert hub.prep.members == ("a", "b")
    hub.passes(1, "b")
    assert hub.prep.members == ("b",)
    assert "gpu-a (box) has not come back to the hub within 30 s" in hub.prep.reason


def test_a_run_that_has_ended_stays_ended():
    hub = Script().trained("a")
    hub.leave("a")
    hub = Script(tuple(hub.records))
    hub.hello("b")
    assert not hub.sent(End)[0][1].failed


def test_a_hub_that_lost_its_journal_says_so():
    hub = Script()
    hub.hello("a", generation=1_000_007, has_state=True)
    ((inc, end),) = hub.sent(End)
    assert inc == "a"
    assert "lost its run directory" in end.reason
    assert hub.state.end is None
    assert any(isinstance(each, CloseConnection) for each in hub.effects)


def test_a_journal_of_another_run_is_refused():
    records = tuple(Script().records)
    with pytest.raises(LaunchError, match=r"run 'other'.*run 'run'"):
        restore(records, replace(SETTINGS, run="other"))
    with pytest.raises(LaunchError, match="Entry 1"):
        restore(records[1:], SETTINGS)


def test_restore_gives_what_was_journalled():
    hub = Script().trained("ab")
    hub.frame("a", Described(generation=hub.go.generation, inc="a", description="mlp"))
    hub.frame("a", Checkpointed(generation=hub.go.generation, inc="a", step=5, name="five"))
    hub.closed("b")
    state = restore(hub.records, SETTINGS)
    for name in ("epoch", "go", "started", "description", "checkpoint", "checkpoint_step", "end"):
        assert getattr(state, name) == getattr(hub.state, name)
    assert isinstance(hub.records[2], GoRecord)


# Connections


def test_a_second_connection_of_a_member_asks_everybody_again():
    hub = Script().trained("ab")
    hub.hello("a", generation=hub.go.generation, has_state=True)
    assert {inc for inc, _ in hub.sent(Prep)} == {"a", "b"}
    assert "gpu-a (box) has connected again" in hub.prep.reason


@pytest.mark.parametrize(
    ("words", "said"),
    [({"run": "other"}, "speaks for run 'other'"), ({"version": "0.9"}, "ragtag 0.9, this run ragtag 1")],
)
def test_strangers_are_refused(words, said):
    hub = Script()
    hub.hello("a", **words)
    assert said in hub.sent(Refused)[0][1].reason
    assert hub.state.workers == ()


def test_a_newcomer_that_connects_again_is_asked_under_another_number():
    hub = Script().trained("a")
    hub.hello("b")
    first = hub.prep.generation
    hub.hello("b")
    assert [(inc, frame.generation) for inc, frame in hub.sent(Prep)] == [("b", first), ("b", first + 1)]
    hub.join("b", has_state=False)
    hub.join("a")
    assert incs(hub.go) == "ab"


def test_before_the_first_generation_a_worker_that_connects_again_is_not_lost():
    hub = Script()
    for inc in "ab":
        hub.hello(inc, expected=2)
    hub.hello("a", expected=2)
    for inc in "ab":
        hub.join(inc, has_state=False)
    assert incs(hub.go) == "ab"


def test_a_reported_step_shows_that_the_run_has_started():
    hub = Script()
    hub.hello("a")
    hub.join("a", has_state=False)
    hub.beat("a", applied=1, applied_digest="one")
    assert hub.state.started
    hub.closed("a")
    hub.passes(31)
    assert hub.state.end is not None
    assert hub.state.end.failed


def test_one_worker_that_always_fails_alone_must_go():
    hub = Script().trained("ab")
    for _ in range(2):
        hub.fail("b")
        for inc in "ab":
            hub.join(inc)
    hub.fail("b")
    assert hub.prep.members == ("a",)
    assert "gpu-b (box) fails again and again on its own" in hub.prep.reason
