"""Which steps are looked at: all that may tell something, and few of the others."""

from types import SimpleNamespace

import pytest

from ragtag.control.blame_calm import Sieve

USUAL_S = 0.1


def vote(own_s=USUAL_S, **more):
    times = {"apply_s": 0.0, "data_s": 0.0, "redo_s": 0.0, "compute_s": own_s, "exposed_s": 0.0}
    return SimpleNamespace(**{**times, "absent": False, "fits": None, "faults": 0, **more})


def step(own_s=USUAL_S, **more):
    return [vote(), vote(own_s, **more)]


def sieve(is_calm=True):
    return Sieve(SimpleNamespace(is_calm=is_calm, usual_step_s=USUAL_S))


def test_of_usual_steps_the_last_stands_for_all():
    assert list(sieve().worth_showing([step()] * 4)) == [3]


def test_where_something_is_suspected_all_are_shown():
    assert list(sieve(is_calm=False).worth_showing([step()] * 4)) == [0, 1, 2, 3]


def test_two_longer_steps_are_shown_with_those_around_them():
    steps = [step(), step(1.2 * USUAL_S), step(1.2 * USUAL_S), step()]
    assert list(sieve().worth_showing(steps)) == [0, 1, 2, 3]


def test_one_longer_step_is_luck_but_one_now_and_then_is_not():
    one = [step(), step(1.2 * USUAL_S), step(), step()]
    picks = sieve()
    assert list(picks.worth_showing(one)) == [3]
    assert list(picks.worth_showing(one)) == [0, 1, 2, 3]
    assert list(picks.worth_showing([step()] * 4)) == [3]
    assert list(picks.worth_showing(one)) == [3]


@pytest.mark.parametrize(
    "told", [{"redo_s": 0.01}, {"absent": True}, {"fits": 2}, {"faults": 100}, {"own_s": 5 * USUAL_S}]
)
def test_what_tells_something_by_itself_is_shown_at_once(told):
    assert list(sieve().worth_showing([step(), step(**told), step()])) == [0, 1, 2]
