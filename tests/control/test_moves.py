import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.moves import move_pieces
from ragtag.core.errors import SettingError
from ragtag.plan.apportion import apportion_times


@st.composite
def deals(draw):
    """Ranks with nondecreasing times, many of them equal, caps, and any shares to start from."""
    ranks = draw(st.integers(1, 6))
    lines = st.tuples(st.integers(0, 30), st.integers(0, 5))
    times = [
        lambda n, start=start, each=each: (start + each * n) * (n > 0)
        for start, each in draw(st.lists(lines, min_size=ranks, max_size=ranks))
    ]
    caps = draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks))
    start = draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks))
    return draw(st.integers(0, sum(caps))), times, caps, start


@given(deals())
def test_moving_pieces_ends_where_dealing_them_out_does(deal):
    total, times, caps, start = deal
    assert move_pieces(total, times, caps, start) == apportion_times(total, times, caps)


def test_where_nothing_changed_a_large_batch_costs_two_looks_a_rank():
    looks = []

    def time(pieces, each):
        looks.append(pieces)
        return each * pieces

    times = [lambda n: time(n, 1), lambda n: time(n, 2), lambda n: time(n, 4)]
    shares = apportion_times(7_000, times)
    looks.clear()
    assert move_pieces(7_000, times, (7_000,) * 3, shares) == shares
    assert len(looks) == 6


def test_too_many_pieces():
    with pytest.raises(SettingError, match="11 do not fit"):
        move_pieces(11, [lambda n: n] * 2, (5, 5), (5, 5))
