from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.window import RECENT, WINDOW, Window, window_of


@given(st.lists(st.floats(1e-9, 1e9), max_size=300) | st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=300))
def test_level_by_level_is_the_same_as_at_once(levels):
    window = reduce(Window.append, levels, Window())
    assert window == window_of(levels)
    assert window.levels == tuple(levels[-WINDOW:])
    assert window.ordered == tuple(sorted(levels[-WINDOW:]))
    assert window.recent == tuple(sorted(levels[-RECENT:]))


def test_a_window_is_a_value():
    before = window_of([1.0] * WINDOW)
    before.append(2.0)
    assert before == window_of([1.0] * WINDOW)
