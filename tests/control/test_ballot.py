"""The vote: nothing is lost on the way, and every disagreement is refused by the same words everywhere."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.control.ballot import Ballot, pack, tally, unpack
from ragtag.core.errors import DisagreementError

HASH = 0x9ABCDEF0


def ballot(**changes):
    fields = {
        "step": 7, "plan_hash": 0xABCDEF012345, "contents_hash": HASH, "samples": 3, "weight": 3.0,
        "loss_total": 1.5, "norm": 2.0, "compute_s": 0.1, "exposed_s": 0.2, "data_s": 0.0, "apply_s": 0.01,
        "metrics": (4.0,), "has_gradient": b"\x05",
    }  # fmt: skip
    return Ballot(**{**fields, **changes})


numbers = st.floats(allow_nan=False)
ballots = st.builds(
    Ballot,
    step=st.integers(0, 2**62),
    plan_hash=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 1000),
    launched_too_early=st.booleans(),
    contents_hash=st.integers(0, 2**32 - 1),
    samples=st.integers(0, 2**40),
    weight=numbers,
    loss_total=numbers,
    norm=numbers,
    compute_s=numbers,
    exposed_s=numbers,
    data_s=numbers,
    apply_s=numbers,
    add_s=numbers,
    send_s=numbers,
    redo_s=numbers,
    host_s=numbers,
    link_host_s=numbers,
    link_s=numbers,
    faults=st.integers(0, 2**62),
    memory_bytes=st.integers(0, 2**62),
    peak_memory_bytes=st.integers(0, 2**62),
    temperature_c=numbers,
    clock_mhz=numbers,
    busy=numbers,
    metrics=st.lists(numbers, max_size=4).map(tuple),
    has_gradient=st.binary(max_size=40),
)


@given(ballots)
def test_a_ballot_survives_the_way(one):
    assert unpack(pack(one), num_metrics=len(one.metrics)) == one


def test_not_a_number_survives_too():
    back = unpack(pack(ballot(loss_total=math.nan, norm=math.inf)), num_metrics=1)
    assert math.isnan(back.loss_total)
    assert back.norm == math.inf


@given(ballots, ballots)
def test_the_length_depends_on_the_numbers_of_metrics_and_parameters_only(one, other):
    other = msgspec.structs.replace(other, metrics=one.metrics, has_gradient=one.has_gradient)
    assert len(pack(one)) == len(pack(other))


def test_sums_norm_and_used_parameters():
    outcome = tally(
        [
            ballot(contents_hash=HASH - 5, weight=2.0, loss_total=1.0, metrics=(1.0,), has_gradient=b"\x01\x80"),
            ballot(
                contents_hash=5, weight=0.5, loss_total=0.25, norm=2.0 + 1e-9, metrics=(2.0,), has_gradient=b"\x02\x00"
            ),
        ],
        expected_hash=HASH,
    )
    assert (outcome.weight, outcome.loss_total, outcome.metrics) == (2.5, 1.25, (3.0,))
    assert outcome.norm == 2.0, "rank 0's norm is everybody's"
    assert outcome.has_gradient == b"\x03\x80"
    assert outcome.finite
    assert not outcome.reduce_again


def test_one_early_bucket_anywhere_makes_everybody_reduce_again():
    rows = [ballot(contents_hash=HASH), ballot(contents_hash=0, launched_too_early=True)]
    assert tally(rows, expected_hash=HASH).reduce_again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 8}, "rank 1 votes with step 8 where rank 0 has 7"),
        ({"plan_hash": 1}, "rank 1 votes with plan_hash"),
        ({"attempt": 1}, "rank 1 votes with attempt 1"),
        ({"weight": -1.0}, "rank 1 has a negative total weight"),
        ({"contents_hash": 1}, "do not hold every sample exactly once"),
        ({"norm": 2.01}, "rank 1 holds a reduced gradient of norm 2.01"),
        ({"norm": math.nan}, "bytes were corrupted"),
    ],
)
def test_disagreements_are_refused_in_the_same_words_by_all(change, message):
    rows = [ballot(contents_hash=HASH), ballot(**{"contents_hash": 0, **change})]
    with pytest.raises(DisagreementError, match=message) as caught:
        tally(rows, expected_hash=HASH)
    assert caught.value.origin_rank == 0


@pytest.mark.parametrize(
    "changes",
    [
        [{"norm": math.nan}, {"norm": math.nan}],
        [{"norm": math.inf}, {"norm": math.inf}],
        [{"loss_total": math.nan}, {}],
        [{"loss_total": math.inf}, {"loss_total": -math.inf}],
        [{}, {"weight": math.nan}],
        [{"weight": math.inf}, {}],
        [{"weight": 1e308}, {"weight": 1e308}],
        [{"loss_total": 1e308}, {"loss_total": 1e308}],
    ],
)
def test_anything_non_finite_makes_the_step_non_finite(changes):
    rows = [ballot(contents_hash=HASH if rank == 0 else 0, **change) for rank, change in enumerate(changes)]
    assert not tally(rows, expected_hash=HASH).finite


def test_a_step_of_weight_zero_is_finite():
    rows = [
        ballot(contents_hash=HASH, weight=0.0, loss_total=0.0, norm=0.0),
        ballot(contents_hash=0, weight=0.0, norm=0.0),
    ]
    assert tally(rows, expected_hash=HASH).weight + 0 == 0


def test_waiting_is_told_apart_from_communication():
    rows = [
        ballot(contents_hash=HASH, compute_s=1.0, exposed_s=3.0, data_s=0.5),
        ballot(contents_hash=0, compute_s=3.5, exposed_s=0.25),
    ]
    outcome = tally(rows, expected_hash=HASH)
    assert outcome.compute_s == (1.0, 3.5)
    assert outcome.comm_s == 0.25, "even the last one to finish waited that long"
    assert outcome.wait_s == (3.25, 0.0)
