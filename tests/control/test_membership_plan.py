"""The plan of a new generation: shares follow what each rank brings, and always add up to the batch."""

from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.membership import Brought, plan_for


def plan(*brought: Brought, batch: int = 24, unit: int = 1, micro_batch: int | None = None):
    return plan_for(brought, global_batch_size=batch, unit=unit, micro_batch=micro_batch, reason="a test")


def test_shares_are_in_proportion_to_speed() -> None:
    assert plan(Brought(level_s=0.1), Brought(level_s=0.1), Brought(level_s=0.2), batch=50).shares == (20, 20, 10)


def test_a_newcomer_counts_as_its_kind_or_as_the_mean_of_all() -> None:
    fast, slow = Brought(device_kind="x", level_s=0.1), Brought(device_kind="y", level_s=0.4)
    assert plan(fast, slow, Brought(device_kind="y"), batch=60).shares == (40, 10, 10)
    assert plan(fast, slow, Brought(device_kind="z"), batch=15).shares == (8, 2, 5)


def test_who_was_parked_stays_so_and_who_has_no_memory_gets_nothing() -> None:
    known = Brought(level_s=0.1)
    assert plan(known, Brought(level_s=0.1, has_work=False), known).shares == (12, 0, 12)
    assert plan(known, Brought(level_s=0.1, micro_batch=0), known).shares == (12, 0, 12)
    assert plan(Brought(has_work=False), Brought(has_work=False)).shares == (12, 12)


def test_a_ranks_own_limit_of_memory_holds() -> None:
    made = plan(Brought(level_s=0.1), Brought(level_s=0.1, micro_batch=4), micro_batch=8)
    assert made.shares == (12, 12)
    assert made.micro_batch == (8, 4)


@given(
    st.lists(
        st.tuples(st.just(0.0) | st.floats(1e-7, 1e4), st.booleans(), st.sampled_from([None, 0, 1, 3])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 200),
)
def test_the_shares_are_always_the_batch(ranks: list[tuple[float, bool, int | None]], batch: int) -> None:
    made = plan(*(Brought(level_s=s, has_work=w, micro_batch=m) for s, w, m in ranks), batch=batch)
    assert sum(made.shares) == batch
    assert min(made.shares) >= 0
    if any(w and m != 0 for _, w, m in ranks):
        assert all(share == 0 for share, (_, w, m) in zip(made.shares, ranks) if not w or m == 0)
