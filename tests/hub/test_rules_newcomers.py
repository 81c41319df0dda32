"""What newcomers may cost those who train: never the run, and never a veteran; and who gets a last chance together."""

import pytest
from tests.hub.scripted_hub import Script, incs

from ragtag.hub.frames import End, Go, Prep, Ready, Refused
from ragtag.hub.rules_forming import FRUITLESS_LIMIT

# Addresses


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_newcomer_that_listens_inside_its_own_machine_is_refused_where_others_train(address):
    hub = Script().trained("ab")
    hub.hello("c", host="desk", address=address)
    ((inc, refused),) = hub.sent(Refused)
    assert inc == "c"
    for part in (f"listens on {address}", "inside desk", "which box cannot reach", "--address"):
        assert part in refused.reason
    assert not hub.sent(Prep)
    assert hub.state.worker("c") is None


def test_a_newcomer_is_refused_where_those_who_train_listen_inside_their_machine():
    hub = Script()
    for inc in "ab":
        hub.hello(inc, expected=2, address="127.0.1.1")
    hub.hello("c", host="desk", address="10.0.0.7")
    ((inc, refused),) = hub.sent(Refused)
    assert inc == "c"
    for part in ("workers on box listen on 127.0.1.1", "which desk cannot reach", "--address"):
        assert part in refused.reason
    for inc in "ab":
        hub.join(inc, has_state=False)
    assert incs(hub.go) == "ab"


def test_inside_one_machine_any_address_will_do_and_members_come_back():
    hub = Script()
    hub.hello("a", address="127.0.0.1")
    hub.join("a", has_state=False)
    hub.frame("a", Ready(generation=hub.go.generation, inc="a"))
    hub.hello("b", address="10.0.0.1")
    hub.hello("c", address="127.0.0.1")
    hub.closed("a")
    hub.hello("a", generation=hub.go.generation, has_state=True, address="127.0.0.1")
    assert not hub.sent(Refused)
    hub = Script()
    hub.hello("a", host="desk", address="127.0.0.1", boot_id="1")
    hub.hello("b", host="desk", address="127.0.0.1", boot_id="2")
    assert len(hub.sent(Refused)) == 1, "two containers of one name are two machines"


# Failures


def with_newcomers(veterans: str, newcomers: str) -> Script:
    hub = Script().trained(f"{veterans}x")
    for inc in newcomers:
        hub.hello(inc, host="desk")
    hub.closed("x")
    all_answer(hub, veterans, newcomers)
    assert incs(hub.go) == veterans + newcomers
    hub.effects.clear()
    return hub


def all_answer(hub: Script, veterans: str, newcomers: str = "") -> None:
    for inc in newcomers:
        if hub.state.preparing and inc in hub.state.preparing.members:
            hub.join(inc, has_state=False)
    for inc in veterans:
        hub.join(inc)


def test_a_veteran_that_newcomers_accuse_stays_and_they_go():
    """One veteran, and three newcomers of one machine that cannot reach it: votes would give it up, and the run."""
    hub = with_newcomers("a", "bcd")
    for _ in range(2):
        for inc in "bcd":
            hub.fail(inc, suspect="a")
        all_answer(hub, "a", "bcd")
    assert incs(hub.go) == "a"
    assert hub.state.end is None
    assert "gpu-d (desk) cannot be reached by other members, time and again" in hub.warnings
    assert "gpu-a" not in hub.warnings.replace("gpu-a (box): broken", "")


def test_who_came_last_goes_although_it_is_a_veteran_by_now():
    hub = with_newcomers("ab", "c")
    hub.frame("c", Ready(generation=hub.go.generation, inc="c"))
    hub.fail("c", suspect="a")
    all_answer(hub, "abc")
    assert (incs(hub.go), hub.go.num_veterans) == ("abc", 3)
    hub.fail("b", suspect="a")
    all_answer(hub, "abc")
    hub.fail("c", suspect="a")
    assert hub.prep.members == ("a", "b"), "although two accuse a"


@pytest.mark.parametrize("reporter", ["a", "c"])
def test_failures_that_name_nobody_are_the_newcomers(reporter):
    hub = with_newcomers("ab", "c")
    hub.fail(reporter)
    all_answer(hub, "ab", "c")
    assert incs(hub.go) == "abc", "one failure is none"
    hub.fail(reporter)
    all_answer(hub, "ab")
    assert incs(hub.go) == "ab"
    assert "gpu-c (desk) has joined, and generations with it fail time and again" in hub.warnings
    assert [inc for inc, _ in hub.sent(Go)].count("c") == 2, "it is told that the others went on"


def test_a_newcomer_that_holds_the_state_is_not_blamed_for_what_names_nobody():
    hub = with_newcomers("ab", "c")
    hub.frame("c", Ready(generation=hub.go.generation, inc="c"))
    for _ in range(3):
        hub.fail("a")
        all_answer(hub, "abc")
    assert "gpu-a (box) fails again and again on its own" in hub.warnings


def test_newcomers_never_end_a_run_in_vain():
    hub = Script().trained("ab")
    for number in range(3 * FRUITLESS_LIMIT):
        newcomer = f"n{number}"
        hub.hello(newcomer, host="desk")
        hub.join(newcomer, has_state=False)
        all_answer(hub, "ab")
        assert len(hub.go.members) == 3
        hub.fail("a", suspect=newcomer)
        hub.closed(newcomer)
        all_answer(hub, "ab")
        assert incs(hub.go) == "ab"
    assert not hub.sent(End)


def test_veterans_that_fail_among_themselves_still_end_the_run_while_newcomers_come():
    hub = Script().trained("ab")
    for number in range(2 * FRUITLESS_LIMIT):
        if hub.state.end is not None:
            break
        hub.now_s += 400  # so that no quarrel is remembered
        for inc in "ab":
            hub.beat(inc)
        if number == 4:
            hub.hello("c", host="desk")
            hub.join("c", has_state=False)
            all_answer(hub, "ab")
            hub.frame("c", Ready(generation=hub.go.generation, inc="c"))
        hub.fail("a", suspect="b")
        all_answer(hub, incs(hub.go))
    assert hub.state.end is not None
    assert f"{FRUITLESS_LIMIT} generations in a row" in hub.state.end.reason


# Everybody loses the hub


def lost_by_all(members: str = "abc") -> Script:
    hub = Script().trained(members)
    for inc in members:
        hub.closed(inc)
    hub.effects.clear()
    return hub


def back(hub: Script, inc: str) -> None:
    hub.hello(inc, generation=hub.go.generation, has_state=True, local_rank="abc".index(inc))


def test_the_first_that_comes_back_does_not_win_alone():
    hub = lost_by_all()
    first = hub.go
    back(hub, "c")
    hub.join("c")
    hub.passes(10, "c")
    assert hub.go == first
    for inc in "ab":
        back(hub, inc)
    for inc in "cab":
        hub.join(inc)
    assert (incs(hub.go), hub.go.num_veterans) == ("abc", 3)


def test_who_does_not_come_back_is_waited_for_half_a_patience_after_the_first():
    hub = lost_by_all()
    hub.passes(5)
    back(hub, "b")
    hub.join("b")
    hub.passes(9, "b")
    back(hub, "a")
    for inc in "ab":
        hub.join(inc)
    hub.passes(5, "ab")
    assert hub.prep.members == ("a", "b", "c")
    hub.passes(1, "ab")
    assert hub.prep.members == ("a", "b")
    for inc in "ab":
        hub.join(inc)
    assert incs(hub.go) == "ab"
    assert "gpu-c (box) has not come back to the hub" in hub.warnings


def test_one_that_comes_and_goes_does_not_lengthen_the_wait():
    hub = lost_by_all()
    back(hub, "a")
    hub.join("a")
    for _ in range(20):
        hub.closed("b")
        hub.passes(1, "a")
        if hub.state.preparing is None or not hub.state.preparing.last_chance:
            break
        back(hub, "b")
        hub.join("a")
    assert hub.state.preparing is not None
    assert not hub.state.preparing.last_chance
    assert hub.now_s <= 100 + 16


def test_without_anybody_the_wait_ends_as_ever():
    hub = lost_by_all()
    hub.passes(29)
    assert hub.state.end is None
    hub.passes(2)
    assert hub.state.end is not None
    assert "no worker that holds the run's state is left" in hub.state.end.reason
