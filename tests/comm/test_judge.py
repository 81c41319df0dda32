"""Walks the rules of waiting without processes: what is known goes in, a verdict comes out."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.comm.judge import Notice, Peers, Sign, Wait, beat_s, error_from, grace_s, judge, silence_s
from ragtag.core.errors import PeerFailed, PeerLost

PATIENCE_S = 30.0


def peers(**changes):
    known = Peers(
        rank=0, hosts=("alpha", "beta", "beta"), patience_s=PATIENCE_S, store_rank=0, store_name="alpha:29500"
    )
    known.looked_s = known.beaten_s = 100.0
    known.signs = {rank: Sign(counter=9, seen_s=99.0, step=4, doing="training", submitted={}) for rank in (1, 2)}
    for name, value in changes.items():
        setattr(known, name, value)
    return known


def waiting(**changes):
    values = {"channel": "data", "number": 7, "doing": "summing gradients", "step": 5, "began_s": 95.0}
    return Wait(**(values | changes))


FAILED = Notice(kind="failed", rank=1, reporter=1, text="ValueError: bad sample", step=5, doing="training")


def test_there_is_hope_while_hearts_beat():
    assert judge(waiting(), peers(), 100.0) is None


def test_a_notice_comes_before_everything_else():
    known = peers(fatal=FAILED, store_failed_s=1.0, left={2: Notice(kind="left", rank=2, reporter=2)})
    assert judge(waiting(broken_s=1.0, broken_peer=2), known, 1000.0) is FAILED
    error = error_from(FAILED, known, "summing gradients")
    assert isinstance(error, PeerFailed)
    assert (error.rank, error.host, error.origin_rank) == (1, "beta", 1)
    assert "Rank 1 (beta) failed at step 5 while training: ValueError: bad sample." in str(error)
    assert "Rank 0 (alpha) was summing gradients" in str(error)


def test_who_left_is_missed_only_where_it_did_not_do_its_part():
    left = Notice(kind="left", rank=2, reporter=2, step=5, succeeded={"data": 7, "control": 3})
    assert judge(waiting(number=7), peers(left={2: left}), 100.0) is None
    for wait in (waiting(number=8), waiting(channel="control", number=4)):
        verdict = judge(wait, peers(left={2: left}), 100.0)
        assert verdict is not None
        assert (verdict.kind, verdict.rank, verdict.reporter) == ("lost", 2, 0)
        assert "Rank 2 (beta) ended its script at step 5" in verdict.text
    assert judge(waiting(number=8), peers(left={0: msgspec.structs.replace(left, rank=0)}), 100.0) is None


def test_a_broken_connection_waits_for_its_explanation():
    grace = grace_s(PATIENCE_S)
    wait = waiting(broken_s=99.5, broken_peer=2, broken_text="reset by peer")
    assert judge(wait, peers(), 99.5 + grace - 0.01) is None
    verdict = judge(wait, peers(), 99.5 + grace)
    assert verdict is not None
    assert verdict.rank == 2
    assert "Rank 2 (beta) closed its connection" in verdict.text
    assert "reset by peer" in verdict.text


@pytest.mark.parametrize(("store_rank", "lost_rank"), [(0, 0), (1, 1), (None, -1)])
def test_a_store_that_broke_or_froze_is_its_hosts_end(store_rank, lost_rank):
    broke = peers(store_rank=store_rank, store_failed_s=99.0, rank=2)
    froze = peers(store_rank=store_rank, beaten_s=60.0, rank=2)
    for known, wait in ((broke, waiting()), (froze, waiting(began_s=60.0))):
        verdict = judge(wait, known, 100.0)
        assert verdict is not None
        assert verdict.rank == lost_rank
        assert isinstance(error_from(verdict, known, "x"), PeerLost)


def test_the_longest_silence_is_named_and_our_own_blindness_is_not_theirs():
    old = {rank: Sign(counter=9, seen_s=seen_s, step=4, doing="training") for rank, seen_s in ((1, 70.0), (2, 60.0))}
    verdict = judge(waiting(), peers(signs=old), 100.0)
    assert verdict is not None
    assert verdict.rank == 2
    assert "no sign of life for 40 s" in verdict.text
    assert "Last heard at step 4, training" in verdict.text
    assert judge(waiting(), peers(signs=old, looked_s=75.0), 100.0) is None


def test_whoever_is_behind_is_named_after_ten_times_the_patience():
    signs = {
        1: Sign(counter=9, seen_s=399.0, step=5, doing="summing gradients", submitted={"data": 7}),
        2: Sign(counter=9, seen_s=399.0, step=4, doing="reading samples", submitted={"data": 6}),
    }
    known = peers(signs=signs, looked_s=400.0, beaten_s=400.0)
    assert judge(waiting(), known, 95.0 + 10 * PATIENCE_S - 1) is None
    verdict = judge(waiting(), known, 95.0 + 10 * PATIENCE_S)
    assert verdict is not None
    assert verdict.rank == 2
    assert "rank 2 (beta) at step 4: reading samples" in verdict.text


@given(
    patience_s=st.floats(0.3, 1000),
    frozen_s=st.floats(0, 100),
    wait_after_s=st.floats(0, 50),
)
def test_whatever_freezes_when_the_end_comes_within_patience(patience_s, frozen_s, wait_after_s):
    """Heartbeats read once per beat see a rank that froze before or during the wait, at the latest after patience."""
    began_s = frozen_s + wait_after_s
    beat = beat_s(patience_s)
    known = peers(patience_s=patience_s)
    looks = (began_s + beat * turn for turn in range(1, 1000))
    first = next(looks)
    known.signs = {1: Sign(counter=1, seen_s=first)}
    for look_s in looks:
        known.looked_s = known.beaten_s = look_s
        if judge(waiting(began_s=began_s), known, look_s) is not None:
            break
    assert silence_s(patience_s) * 0.999 <= known.looked_s - began_s <= patience_s * 1.001
