import math
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm import link_times
from ragtag.comm.frame import Frame, FrameReader, encode
from ragtag.comm.link_times import LinkTimes


class Ranks:
    """Ranks in a ring whose clocks differ; true time goes on only where a test says so."""

    def __init__(self, *ahead_s: float, clock_names: tuple[str, ...] = (), vote_s: Callable[[int, int], float]) -> None:
        self.now_s = 5.0
        self._ahead_s = ahead_s
        self._vote_s = vote_s
        names = clock_names or tuple(str(rank) for rank in range(len(ahead_s)))
        self.times = [
            LinkTimes(rank, len(ahead_s), clock=lambda rank=rank: self.clock(rank), clock_name=names[rank])
            for rank in range(len(ahead_s))
        ]

    def clock(self, rank: int) -> float:
        return self.now_s + self._ahead_s[rank]

    def message(self, to: int, *, waits_s: float = 0.0, under_way_s: float = 0.0, unnoticed_s: float = 0.0) -> None:
        """Rank `to` waits `waits_s` before the preceding one hands a message over, which is under way for
        `under_way_s`; for the first `unnoticed_s` of that it does something else."""
        began_s = self.clock(to) + unnoticed_s
        self.now_s += waits_s
        source = (to - 1) % len(self.times)
        self.times[source].handed_over(self.clock(source))
        self.now_s += under_way_s
        self.times[to].waited(began_s, self.clock(to))

    def vote(self) -> list[float]:
        """Everybody votes; what each rank says of its link."""
        asides = [
            (source, target, self.times[source].aside(target))
            for source in range(len(self.times))
            for target in range(len(self.times))
            if source != target
        ]
        began_s = self.now_s
        for source, target, aside in sorted(asides, key=lambda each: self._vote_s(each[0], each[1])):
            self.now_s = began_s + self._vote_s(source, target)
            self.times[target].heard(source, aside)
        return [times.take() for times in self.times]


def quick(source: int, target: int) -> float:
    return 1e-4


def same_clock(world_size: int) -> Ranks:
    return Ranks(*[0.0] * world_size, clock_names=("a",) * world_size, vote_s=quick)


def test_what_was_under_way_counts_for_the_rank_that_received_it():
    ranks = same_clock(3)
    ranks.message(1, under_way_s=0.020)
    assert ranks.vote() == pytest.approx([0.0, 0.020, 0.0], abs=1e-9)
    assert ranks.vote() == [0.0, 0.0, 0.0], "once"


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0, 1e-3])
def test_clocks_that_differ(ahead_s):
    ranks = Ranks(0.0, ahead_s, -3 * ahead_s, vote_s=quick)
    ranks.vote()  # with the first votes the clocks are not known yet
    for to in range(3):
        ranks.message(to, under_way_s=0.010 * (1 + to))
    ranks.vote()
    for to in range(3):
        ranks.message(to, under_way_s=0.010 * (1 + to))
    assert ranks.vote() == pytest.approx([0.010, 0.020, 0.030], abs=1e-9)


def test_nothing_is_said_before_the_clocks_are_known():
    ranks = Ranks(0.0, 1000.0, 0.0, vote_s=quick)
    ranks.message(1, under_way_s=0.020)
    assert ranks.vote() == [0.0, 0.0, 0.0]


def test_votes_that_are_sometimes_late_do_not_move_the_clocks():
    late = [False]
    ranks = Ranks(0.0, 1000.0, 0.0, vote_s=lambda source, target: 0.5 if late[0] and target == 1 else 1e-4)
    for number in range(20):
        late[0] = number % 3 > 0
        ranks.vote()
    ranks.message(1, under_way_s=0.020)
    assert ranks.vote()[1] == pytest.approx(0.020, abs=1e-6)


def test_votes_that_take_longer_one_way_move_them_by_half_the_difference():
    ranks = Ranks(0.0, 1000.0, 0.0, vote_s=lambda source, target: 5e-3 if (source, target) == (0, 1) else 1e-3)
    ranks.vote()
    ranks.vote()
    ranks.message(1, under_way_s=0.020)
    assert ranks.vote()[1] == pytest.approx(0.018, abs=1e-6)


def test_on_one_machine_the_clock_is_the_same_however_long_votes_take():
    ranks = Ranks(
        0.0, 0.0, 0.0, clock_names=("a", "a", "b"), vote_s=lambda source, target: 0.1 if target == 1 else 1e-3
    )
    ranks.message(1, under_way_s=0.020)
    assert ranks.vote()[1] == pytest.approx(0.020, abs=1e-9), "with the first vote"


def test_clocks_without_names_are_not_taken_for_the_same():
    ranks = Ranks(0.0, 7.0, 0.0, clock_names=("", "", ""), vote_s=quick)
    ranks.vote()
    ranks.vote()
    ranks.message(1, under_way_s=0.020)
    assert ranks.vote()[1] == pytest.approx(0.020, abs=1e-9)


def test_clocks_that_drift_are_followed():
    ahead = [0.0]

    class Drifting(Ranks):
        def clock(self, rank: int) -> float:
            return self.now_s + (ahead[0] if rank == 1 else 0.0)

    ranks = Drifting(0.0, 0.0, 0.0, vote_s=quick)
    for _ in range(200):
        ahead[0] += 0.5e-3
        ranks.vote()
    ranks.message(1, under_way_s=0.200)
    # Least times are from the newest 32 to 64 votes, so half of what the clocks have drifted since is left.
    assert ranks.vote()[1] == pytest.approx(0.200, abs=0.035)


def test_waiting_for_a_rank_that_is_slow_is_not_the_links():
    ranks = same_clock(3)
    ranks.message(1, waits_s=3.0, under_way_s=0.020)
    assert ranks.vote()[1] == pytest.approx(0.020, abs=1e-9)


def test_what_is_under_way_while_there_is_other_work_does_not_count():
    ranks = same_clock(3)
    ranks.message(1, under_way_s=0.020, unnoticed_s=0.015)
    ranks.message(1, under_way_s=0.020, unnoticed_s=0.020)
    assert ranks.vote()[1] == pytest.approx(0.005, abs=1e-9)


def test_messages_of_a_step_add_up():
    ranks = same_clock(2)
    for _ in range(10):
        ranks.message(0, under_way_s=0.001)
        ranks.message(1, under_way_s=0.002)
    assert ranks.vote() == pytest.approx([0.010, 0.020], abs=1e-9)


def test_only_neighbours_are_told():
    times = LinkTimes(0, 4, clock=lambda: 0.0)
    times.handed_over(0.0)
    assert times.aside(2) == b""
    assert times.aside(3) != b"", "the preceding one needs this rank's clock"
    assert len(times.aside(1)) == len(times.aside(3)) + 8


def test_stamps_that_were_forgotten_are_passed_over(monkeypatch):
    monkeypatch.setattr(link_times, "_MOST_STAMPS", 4)
    ranks = same_clock(2)
    for number in range(10):
        ranks.message(1, under_way_s=0.001 * number)
    # Both ends keep the newest four.
    assert ranks.vote()[1] == pytest.approx(0.006 + 0.007 + 0.008 + 0.009, abs=1e-9)
    ranks.message(1, under_way_s=0.002)
    assert ranks.vote()[1] == pytest.approx(0.002, abs=1e-9)


def test_a_vote_that_is_lost_leaves_the_others_numbers_aligned():
    ranks = same_clock(2)
    ranks.vote()
    ranks.message(1, under_way_s=0.5)
    ranks.times[0].aside(1)  # goes nowhere
    ranks.message(1, under_way_s=0.002)
    assert ranks.vote()[1] == pytest.approx(0.002, abs=1e-9)


def test_stamps_without_a_wait_are_passed_over():
    ranks = same_clock(2)
    ranks.vote()
    ranks.message(1, under_way_s=0.5)
    ranks.times[1]._waits.clear()
    ranks.message(1, under_way_s=0.002)
    assert ranks.vote()[1] == pytest.approx(0.002, abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from([0, 2, 3]), st.binary(max_size=80)), max_size=10))
def test_garbage_does_no_harm(asides):
    times = LinkTimes(1, 4, clock=lambda: 7.0)
    waited_s = 0.0
    for number, (peer, aside) in enumerate(asides):
        times.waited(float(number), number + 0.5)
        waited_s += 0.5
        times.heard(peer, aside)
        assert isinstance(times.aside(peer), bytes)
        late_s = times.take()
        assert math.isfinite(late_s)
        assert 0.0 <= late_s <= waited_s


def test_a_cut_stamp_is_left_out():
    ranks = same_clock(2)
    for _ in range(2):
        ranks.message(1, under_way_s=0.003)
    aside = ranks.times[0].aside(1)
    ranks.times[1].heard(0, ranks.times[1].aside(0))
    ranks.times[1].heard(0, aside[:-3])
    ranks.times[0].heard(1, ranks.times[1].aside(0))
    ranks.times[1].heard(0, ranks.times[0].aside(1))
    assert ranks.times[1].take() == pytest.approx(0.003, abs=1e-3)


def test_the_longest_aside_fits_into_a_frame():
    times = LinkTimes(0, 2, clock=lambda: 0.0)
    for _ in range(2 * link_times._MOST_STAMPS):
        times.handed_over(1.0)
    aside = times.aside(1)
    assert len(aside) == struct.calcsize("!QddQ") + 8 * link_times._MOST_STAMPS
    [frame] = FrameReader().feed(encode(Frame(1, 2, "voting", b"ballot", aside)))
    assert frame.aside == aside


def test_a_boot_has_a_name():
    assert link_times.boot_id() == link_times.boot_id()
