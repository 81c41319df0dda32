from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.profile import DeviceProfile, Memory, Timing
from ragtag.cost.reduction import Line
from ragtag.plan.allocate import Seat, allocate
from ragtag.plan.apportion import apportion_times
from ragtag.plan.load import Load, Option, own_options


def device(timings, **fields):
    return DeviceProfile(
        name="d", timings=tuple(Timing(samples=size, seconds=seconds) for size, seconds in timings), **fields
    )


devices = st.builds(
    lambda pairs, optimizer_s: device(sorted(dict(pairs).items()), optimizer_s=optimizer_s),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5000).map(lambda ms: ms / 1e3)), min_size=1, max_size=4),
    st.integers(0, 2000).map(lambda ms: ms / 1e3),
)
seats = st.builds(
    lambda one, size, limit, hidden, first_s, last_s: Seat(
        load=Load(one, (Option(micro_batch=size),), limit=limit),
        lines=(Line(hidden, first_s), Line(hidden / 2, (first_s + last_s) / 2), Line(0.0, min(last_s, first_s))),
    ),
    devices,
    st.none() | st.integers(1, 8),
    st.none() | st.integers(0, 12),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.floats(0, 3),
    st.floats(0, 3),
)


def ends_s(chosen, units):
    return [seat.load.end_s(count, seat.lines) for seat, count in zip(chosen, units)]


@given(st.lists(seats, min_size=1, max_size=3), st.integers(1, 12))
def test_no_other_split_is_done_earlier(chosen, total):
    found = allocate(total, chosen)
    limits = [total if seat.load.limit is None else min(total, seat.load.limit) for seat in chosen]
    splits = [units for units in product(*(range(limit + 1) for limit in limits)) if sum(units) == total]
    if found is None:
        assert not splits
        return
    units, seconds = found
    assert sum(units) == total
    assert all(count <= limit for count, limit in zip(units, limits))
    assert abs(seconds - max(ends_s(chosen, units))) < 1e-9
    assert seconds <= min(max(ends_s(chosen, split)) for split in splits) + 1e-9


@given(st.lists(devices, min_size=1, max_size=12), st.integers(1, 300), st.floats(0.01, 100))
def test_it_ends_as_early_as_dealing_out_piece_by_piece(machines, total, hint_s):
    chosen = [Seat(load=Load(one, (Option(micro_batch=7),))) for one in machines]
    found = allocate(total, chosen, hint_s=hint_s)
    assert found is not None
    dealt = apportion_times(
        total, [lambda count, seat=seat: round(1e9 * seat.load.end_s(count, seat.lines)) for seat in chosen]
    )
    assert abs(found[1] - max(ends_s(chosen, dealt))) < 1e-8


def test_the_same_question_has_the_same_answer_whatever_the_hint():
    chosen = [Seat(load=Load(device([(1, s), (9, 9 * s)]), (Option(micro_batch=None),))) for s in (0.1, 0.1, 0.17, 0.3)]
    answers = {allocate(101, chosen, hint_s=hint) for hint in (0.0, 1e-3, 3.0, 1e3)}
    assert len(answers) == 1


def test_a_rank_that_can_compute_nothing_still_takes_its_constant_time():
    idle = Seat(load=Load(device([(1, 1.0)], optimizer_s=9.0), ()), lines=(Line(0.5, 2.0), Line(0.0, 1.0)))
    busy = Seat(load=Load(device([(1, 1.0)]), (Option(micro_batch=1),)))
    assert allocate(3, [idle, busy]) == ((0, 3), 11.0)


def test_own_sizes_fit_and_recompute_is_among_them_only_where_it_was_measured():
    memory = Memory(fixed_bytes=10, per_sample_bytes=10, recompute_per_sample_bytes=2)
    one = device([(1, 1.0), (4, 4.0)], capacity_bytes=50, memory=memory)
    assert {option.micro_batch for option in own_options(one)} == {1, 2, 3, 4}
    assert max(option.micro_batch for option in own_options(one, recompute=True) if option.recompute) == 20
    plain = device([(1, 1.0)], capacity_bytes=50, memory=Memory(fixed_bytes=10, per_sample_bytes=50))
    assert own_options(plain, recompute=True) == ()
