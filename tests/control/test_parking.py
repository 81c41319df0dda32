from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.parking import COST_OF_TRIES, FEWEST_STEPS, TRY_STEPS, Parked, next_try


@given(st.floats(1e-4, 1e3), st.floats(1e-4, 1e3), st.integers(0, 20))
def test_tries_cost_a_bounded_part_of_the_time(alone_s, step_s, tries):
    wait = next_try(Parked(rank=1, since=100, tries=tries), alone_s=alone_s, step_s=step_s) - 100
    assert wait >= FEWEST_STEPS
    assert TRY_STEPS * max(alone_s - step_s, 0) <= COST_OF_TRIES * wait * step_s * (1 + 1e-9)


def test_each_try_in_vain_doubles_the_wait_and_an_unknown_rank_is_tried_soon():
    waits = [next_try(Parked(rank=0, since=0, tries=tries), alone_s=1.0, step_s=1.0) for tries in range(3)]
    assert waits == [20, 40, 80]
    assert next_try(Parked(rank=0, since=7), alone_s=None, step_s=1.0) == 10


def test_when_the_others_slow_down_it_is_tried_sooner():
    parked = Parked(rank=0, since=0)
    assert next_try(parked, alone_s=1.0, step_s=0.5) < next_try(parked, alone_s=1.0, step_s=0.1)
