from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragtag.core.ledger import Ledger, LedgerError, micro_batches


def make(units_per_rank=(3, 2, 1), unit=1, samples=None, step=7) -> Ledger:
    return Ledger(
        step=step, samples=samples or sum(units_per_rank) * unit, unit=unit, units_per_rank=tuple(units_per_rank)
    )


def hashes_match(ledger: Ledger) -> bool:
    return sum(ledger.contents_hash(rank) for rank in range(ledger.world_size)) % 2**32 == ledger.expected_hash


def finish(ledger: Ledger) -> None:
    for rank in range(ledger.world_size):
        ledger.record_sum(rank, ledger.todo(rank))


def test_planned_shares_are_runs_in_rank_order():
    ledger = make((3, 0, 2), unit=4, samples=18)
    assert [ledger.todo(rank) for rank in range(3)] == [(0, 1, 2), (), (3, 4)]
    assert [ledger.span(unit) for unit in range(5)] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
    assert [ledger.samples_of(rank) for rank in range(3)] == [12, 0, 6]
    assert [ledger.owner(unit) for unit in range(5)] == [0, 0, 0, 2, 2]


def test_an_undisturbed_step():
    ledger = make()
    assert not ledger.complete
    finish(ledger)
    assert ledger.complete
    assert hashes_match(ledger)
    assert ledger.contents(0) == (0, 1, 2)


def test_a_pulled_tail():
    ledger = make((4, 1))
    ledger.record_sum(0, (0,))
    ledger.claim(3, 1)
    ledger.claim(3, 1)
    assert ledger.todo(0) == (1, 2)
    assert ledger.todo(1) == (3, 4)
    assert ledger.owner(3) == 1
    with pytest.raises(LedgerError, match="rank 0 cannot add unit 3, which is claimed by rank 1"):
        ledger.record_sum(0, (1, 2, 3))
    assert ledger.contents(0) == (0,)
    finish(ledger)
    assert ledger.contents(1) == (3, 4)
    assert ledger.samples_of(1) == 2
    assert hashes_match(ledger)


def test_out_of_memory_redoes_the_same_units():
    ledger = make((3, 1))
    ledger.claim(3, 0)
    ledger.record_sum(0, (0, 1))
    ledger.drop(0)
    assert ledger.todo(0) == (0, 1, 2, 3)
    assert ledger.contents(0) == ()
    with pytest.raises(LedgerError, match="rank 1 cannot claim unit 0, which is claimed by rank 0"):
        ledger.claim(0, 1)
    finish(ledger)
    assert hashes_match(ledger)


def test_a_dead_ranks_work_is_shared_out():
    ledger = make((2, 2, 2))
    ledger.record_sum(1, (2,))
    ledger.claim(5, 1)
    ledger.void(1)
    assert ledger.missing() == (2, 3, 5)
    assert ledger.owner(2) is None
    with pytest.raises(LedgerError, match="rank 0 cannot claim unit 2, which is missing"):
        ledger.claim(2, 0)
    for unit, rank in zip(ledger.missing(), (0, 2, 2)):
        ledger.assign(unit, rank)
    finish(ledger)
    assert [ledger.contents(rank) for rank in range(3)] == [(0, 1, 2), (), (3, 4, 5)]
    assert ledger.complete
    assert hashes_match(ledger)


def test_overlapping_sums_the_later_rank_drops():
    ledger = make((2, 2, 2))
    assert ledger.settle([(0, 1, 4), (2, 4), (5,)]) == (1,)
    assert ledger.missing() == (2, 3)
    assert ledger.todo(0) == ()
    ledger.assign(2, 1)
    ledger.assign(3, 2)
    finish(ledger)
    assert hashes_match(ledger)


def test_a_dropped_sum_does_not_make_others_drop():
    # Rank 1 overlaps rank 0 and is void, so rank 2 overlaps nobody any more.
    assert make((2, 2, 2)).settle([(0, 1), (1, 2), (2, 3)]) == (1,)


def test_a_lost_and_a_doubled_unit_do_not_look_complete():
    ledger, other = make((3, 3)), make((3, 3))
    ledger.record_sum(0, (0, 1, 2))
    other.claim(2, 1)
    other.record_sum(1, (2, 4, 5))
    # Six units in two sums, but unit 2 twice and unit 3 never.
    assert (ledger.contents_hash(0) + other.contents_hash(1)) % 2**32 != ledger.expected_hash


def test_hashes_are_pinned_and_differ_by_step():
    ledger, later = make(step=7), make(step=8)
    finish(ledger)
    finish(later)
    assert [ledger.contents_hash(rank) for rank in range(3)] == [2293031606, 3108467591, 473847922]
    assert ledger.expected_hash != later.expected_hash


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda ledger: ledger.claim(0, 1), "rank 1 cannot claim unit 0, which is in the sum of rank 0"),
        (lambda ledger: ledger.claim(9, 1), r"units \(9,\) are not all in 0..5"),
        (lambda ledger: ledger.claim(-1, 1), r"units \(-1,\) are not all in 0..5"),
        (lambda ledger: ledger.claim(1, -1), r"rank -1 is not in 0..2"),
        (lambda ledger: ledger.claim(1, 3), r"rank 3 is not in 0..2"),
        (lambda ledger: ledger.record_sum(0, (0,)), "rank 0 cannot add unit 0, which is in the sum of rank 0"),
        (lambda ledger: ledger.record_sum(0, (3,)), "rank 0 cannot add unit 3, which is planned for rank 1"),
        (lambda ledger: ledger.record_sum(0, (1, 1)), r"rank 0 added a unit twice: \(1, 1\)"),
        (lambda ledger: ledger.record_sum(0, (77,)), r"units \(77,\) are not all in 0..5"),
        (lambda ledger: ledger.assign(0, 1), "unit 0 for rank 1 is not missing: it is in the sum of rank 0"),
        (lambda ledger: ledger.assign(6, 1), r"units \(6,\) are not all in 0..5"),
        (lambda ledger: ledger.span(6), r"units \(6,\) are not all in 0..5"),
        (lambda ledger: ledger.settle([(), ()]), "contents of 2 sums for 3 ranks"),
        (lambda ledger: ledger.settle([(), (1, 1), ()]), "the sum of rank 1 holds a unit twice"),
        (lambda ledger: ledger.settle([(), (6,), ()]), r"units \(6,\) are not all in 0..5"),
    ],
)
def test_illegal_moves_name_unit_and_ranks_and_change_nothing(move, message):
    ledger = make()
    ledger.record_sum(0, (0,))
    with pytest.raises(LedgerError, match=f"step 7: .*{message}|step 7: {message}"):
        move(ledger)
    assert [ledger.todo(rank) for rank in range(3)] == [(1, 2), (3, 4), (5,)]
    assert ledger.contents(0) == (0,)


@pytest.mark.parametrize("units_per_rank", [(3, 3), (4, 2), (6, -1), (0, 0)])
def test_a_plan_that_is_not_the_batch_is_refused(units_per_rank):
    with pytest.raises(LedgerError, match="are 5 units, but the ranks are planned"):
        Ledger(step=1, samples=18, unit=4, units_per_rank=units_per_rank)


@given(st.sets(st.integers(0, 60)), st.integers(1, 12))
def test_micro_batches_of_single_samples(units, size):
    ledger = make((61,))
    batches = micro_batches(ledger, sorted(units), size)
    assert [unit for batch in batches for unit in batch] == sorted(units)
    for batch in batches:
        assert 1 <= len(batch) <= size
        assert batch == tuple(range(batch[0], batch[0] + len(batch)))
    for batch, after in pairwise(batches):
        # Only the last of a consecutive run is smaller.
        assert len(batch) == size or batch[-1] + 1 != after[0]


def test_micro_batches_of_a_share():
    assert [len(batch) for batch in micro_batches(make((10,)), range(10), 4)] == [4, 4, 2]
    assert micro_batches(make((10,)), (0, 1, 2, 7, 8), None) == [(0, 1, 2), (7, 8)]
    assert micro_batches(make((10,)), (), None) == []


def test_a_unit_of_several_samples_is_a_micro_batch():
    assert micro_batches(make((3,), unit=8), (0, 2), 1) == [(0,), (2,)]


def test_micro_batches_need_ascending_units():
    with pytest.raises(LedgerError, match="do not ascend"):
        micro_batches(make((10,)), (3, 2), 4)


WORLD = 3
UNITS = 9
ranks = st.integers(0, WORLD - 1)
units = st.integers(0, UNITS - 1)


class LedgerAgainstNaiveModel(RuleBasedStateMachine):
    """Every move, legal or not, on the ledger and on one dict of unit -> (state, rank)."""

    def __init__(self):
        super().__init__()
        self.ledger = make((4, 0, 5), unit=2, samples=17)
        self.model: dict[int, tuple[str, int]] = {unit: ("planned", 0 if unit < 4 else 2) for unit in range(UNITS)}

    def having(self, *states: str, rank: int) -> list[int]:
        return [unit for unit, (state, whose) in self.model.items() if state in states and whose == rank]

    def attempt(self, legal: bool, move) -> bool:
        if legal:
            move()
        else:
            with pytest.raises(LedgerError):
                move()
        return legal

    @rule(unit=units, rank=ranks)
    def claim(self, unit, rank):
        state, whose = self.model[unit]
        legal = state == "planned" or (state == "claimed" and whose == rank)
        if self.attempt(legal, lambda: self.ledger.claim(unit, rank)):
            self.model[unit] = ("claimed", rank)

    @rule(rank=ranks, count=st.integers(0, UNITS))
    def sum_own(self, rank, count):
        added = self.having("planned", "claimed", rank=rank)[:count]
        self.ledger.record_sum(rank, added)
        self.model.update(dict.fromkeys(added, ("summed", rank)))

    @rule(rank=ranks, added=st.lists(units, max_size=3))
    def sum_any(self, rank, added):
        own = self.having("planned", "claimed", rank=rank)
        legal = len(set(added)) == len(added) and set(added) <= set(own)
        if self.attempt(legal, lambda: self.ledger.record_sum(rank, added)):
            self.model.update(dict.fromkeys(added, ("summed", rank)))

    @rule(rank=ranks)
    def drop(self, rank):
        self.ledger.drop(rank)
        self.model.update(dict.fromkeys(self.having("summed", rank=rank), ("claimed", rank)))

    @rule(rank=ranks)
    def void(self, rank):
        self.ledger.void(rank)
        self.model.update(dict.fromkeys(self.having("planned", "claimed", "summed", rank=rank), ("missing", -1)))

    @rule(unit=units, rank=ranks)
    def assign(self, unit, rank):
        legal = self.model[unit][0] == "missing"
        if self.attempt(legal, lambda: self.ledger.assign(unit, rank)):
            self.model[unit] = ("claimed", rank)

    @rule(stray=st.lists(st.sets(units, max_size=2), min_size=WORLD, max_size=WORLD))
    def settle(self, stray):
        # Every rank's own sum, and what stale claims made some of them add besides.
        contents = [set(self.having("summed", rank=rank)) | stray[rank] for rank in range(WORLD)]
        taken: set[int] = set()
        dropped = []
        self.model = dict.fromkeys(range(UNITS), ("missing", -1))
        for rank in range(WORLD):
            if contents[rank] & taken:
                dropped.append(rank)
                continue
            taken |= contents[rank]
            self.model.update(dict.fromkeys(contents[rank], ("summed", rank)))
        assert self.ledger.settle([sorted(held) for held in contents]) == tuple(dropped)

    @invariant()
    def the_books_agree(self):
        held = [self.ledger.contents(rank) for rank in range(WORLD)]
        open_units = [self.ledger.todo(rank) for rank in range(WORLD)]
        for rank in range(WORLD):
            assert list(held[rank]) == self.having("summed", rank=rank)
            assert list(open_units[rank]) == self.having("planned", "claimed", rank=rank)
            spans = [self.ledger.span(unit) for unit in held[rank] + open_units[rank]]
            assert self.ledger.samples_of(rank) == sum(stop - start for start, stop in spans)
        assert list(self.ledger.missing()) == self.having("missing", rank=-1)
        for unit, (state, rank) in self.model.items():
            assert self.ledger.owner(unit) == (None if state == "missing" else rank)

    @invariant()
    def no_unit_is_lost_or_doubled(self):
        everywhere = [*self.ledger.missing()]
        for rank in range(WORLD):
            everywhere += [*self.ledger.todo(rank), *self.ledger.contents(rank)]
        assert sorted(everywhere) == list(range(UNITS))

    @invariant()
    def complete_means_what_the_hashes_say(self):
        all_summed = all(state == "summed" for state, _ in self.model.values())
        assert self.ledger.complete == all_summed
        assert hashes_match(self.ledger) == all_summed


TestLedgerAgainstNaiveModel = LedgerAgainstNaiveModel.TestCase
TestLedgerAgainstNaiveModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
