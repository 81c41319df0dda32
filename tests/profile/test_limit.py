from hypothesis import given
from hypothesis import strategies as st

from ragtag.profile.limit import Limit, find_limit, sizes_to_time
from ragtag.profile.memory_line import memory_line, per_sample_from


@given(st.integers(1, 50), st.integers(0, 5000), st.integers(0, 10_000))
def test_the_limit_is_the_largest_that_fits(least, further, largest):
    most, tried = least + further, []

    def fits(size):
        tried.append(size)
        return size <= largest

    limit = find_limit(fits, least=least, most=most)
    if largest < least:
        assert limit == Limit(largest=0, refused=least)
    elif largest >= most:
        assert limit == Limit(largest=most, refused=None)
    else:
        assert limit == Limit(largest=largest, refused=largest + 1)
    assert len(tried) <= 2 + 2 * most.bit_length()
    assert all(least <= size <= most for size in tried)


@given(st.integers(1, 100), st.integers(1, 3000), st.integers(1, 3000))
def test_what_is_not_worth_trying_is_not_tried(least, largest, dear):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    find_limit(fits, least=least, most=4000, worth_trying=lambda size: size < dear)
    assert all(size == least or size < dear for size in tried)


@given(st.integers(1, 64), st.integers(0, 5000))
def test_times_are_taken_from_the_least_to_the_largest(least, further):
    sizes = sizes_to_time(least, least + further)
    assert sizes[0] == least
    assert sizes[-1] == least + further
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 2 + (least + further).bit_length()


bytes_per = st.integers(1, 10_000)


@given(
    fixed=st.integers(0, 10**6),
    per=bytes_per,
    constant=st.integers(0, 1000),
    room=st.integers(1, 500),
    most=st.integers(1, 600),
)
def test_a_line_says_what_fits_and_what_does_not(fixed, per, constant, room, most):
    """Memory that is fixed + constant + per * samples, and a capacity somewhere between two sizes."""

    def used(samples):
        return fixed + constant + per * samples

    capacity = used(room) + per - 1
    limit = find_limit(lambda size: used(size) <= capacity, least=1, most=most)
    peaks = {size: used(size) for size in {1, max(1, limit.largest // 2), limit.largest}}
    memory = memory_line(peaks, limit=limit, capacity_bytes=capacity, floor_bytes=fixed)
    line = {size: memory.fixed_bytes + memory.per_sample_bytes * size for size in range(1, limit.largest + 2)}
    assert line[limit.largest] == used(limit.largest) <= capacity
    if limit.refused is not None:
        assert line[limit.refused] > capacity
    if limit.largest >= 2:
        largest_error = max(abs(line[size] - used(size)) for size in range(1, limit.largest + 1))
        assert largest_error <= (0 if limit.refused is None else limit.largest * per)


@given(fixed=st.integers(0, 10**6), per=bytes_per, room=st.integers(1, 500), most=st.integers(1, 600))
def test_another_line_with_the_same_fixed_part_says_so_too(fixed, per, room, most):
    capacity = fixed + per * room + per - 1
    limit = find_limit(lambda size: fixed + per * size <= capacity, least=1, most=most)
    found = per_sample_from(fixed, fixed + per * limit.largest, limit=limit, capacity_bytes=capacity)
    assert fixed + found * limit.largest <= capacity
    if limit.refused is None:
        assert found == per
    else:
        assert fixed + found * limit.refused > capacity
