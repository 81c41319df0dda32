"""What a backward hides of a reduction in buckets, against a schedule that is played through bucket by bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.cluster import Cluster, Device
from ragtag.core.profile import DeviceProfile, LinkProfile, ModelFacts, Profile, Timing
from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.problem import assemble
from ragtag.cost.reduction import bucket_rings_s, exposed_ring_s, hidden_part, lines, num_buckets, ready_parts
from ragtag.cost.step import predict_on

CLUSTER = Cluster(devices=(Device(name="a", host="one"), Device(name="b", host="two")))


def problem_of(bucket_bytes=(), ready=((), ()), *, gradient_bytes=None, sample_s=(1.0, 1.0), latency_s=0.0, batch=6):
    model = ModelFacts(
        name="m",
        shape_hash="",
        parameters=1,
        parameter_bytes=1,
        gradient_bytes=sum(bucket_bytes) if gradient_bytes is None else gradient_bytes,
        optimizer_bytes=0,
        bucket_bytes=tuple(bucket_bytes),
    )
    devices = tuple(
        DeviceProfile(name=name, timings=(Timing(samples=1, seconds=seconds),), bucket_ready=tuple(parts))
        for name, seconds, parts in zip("ab", sample_s, ready, strict=True)
    )
    link = LinkProfile(between=("one", "two"), bandwidth_bytes_per_s=1e6, latency_s=latency_s)
    return assemble(Profile(model=model, global_batch_size=batch, devices=devices, links=(link,)), CLUSTER)


def played_through(rings_s, ready_at_s):
    """Buckets in their order, each when it is complete everywhere and the one before has been around the ring."""
    free_s = 0.0
    for ring_s, *ready in zip(rings_s, *ready_at_s, strict=True):
        free_s = max(free_s, *ready) + ring_s
    return free_s


buckets = st.integers(1, 8).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 10**7), min_size=count, max_size=count),
        st.tuples(*[st.lists(st.floats(0, 1), min_size=count, max_size=count).map(sorted)] * 2),
    )
)


@given(buckets, st.floats(0.01, 5), st.floats(0.01, 5), st.integers(0, 6), st.floats(0, 0.1))
def test_a_step_ends_as_buckets_played_through_one_after_the_other_do(measured, first_s, second_s, share, latency_s):
    sizes, ready = measured
    problem = problem_of(sizes, ready, sample_s=(first_s, second_s), latency_s=latency_s)
    shares = share, 6 - share
    parts = tuple(Part(device=name, samples=count, micro_batch=6) for name, count in zip("ab", shares, strict=True))
    predicted = predict_on(problem, Candidate(name="x", layout="replicated", parts=parts))
    work_s = [count * seconds for count, seconds in zip(shares, (first_s, second_s), strict=True)]
    # A backward is two thirds of the work; who computes nothing has everything ready at once.
    ready_at_s = [[work / 3 + part * work * 2 / 3 for part in parts] for work, parts in zip(work_s, ready, strict=True)]
    rings_s = bucket_rings_s(problem, ["one", "two"])
    # Never before a device has ended its own work: gradients may all be there earlier.
    expected_s = max(played_through(rings_s, ready_at_s), *work_s) + latency_s
    assert predicted.step_s == pytest.approx(expected_s)


@given(buckets, st.floats(0, 30), st.floats(0, 30))
def test_a_longer_backward_never_leaves_more_and_never_saves_more_than_itself(measured, backward_s, more_s):
    sizes, ready = measured
    problem = problem_of(sizes, ready)
    rings_s = bucket_rings_s(problem, ["one", "two"])
    device = problem.ranks[0].device
    short, long = (
        max(line.after_s(seconds) for line in lines(problem, device, rings_s))
        for seconds in (backward_s, backward_s + more_s)
    )
    assert long <= short + 1e-9
    assert short - long <= more_s + 1e-9
    assert short <= sum(rings_s) + 1e-9


def test_a_first_bucket_that_holds_most_of_the_model_hides_little():
    """As in the demo's GPT: buckets of 4.34 and 1.43 MB, the first one complete after 77 % of the backward."""
    problem = problem_of((4_340_000, 1_430_000), ((0.77, 1.0),) * 2)
    assert hidden_part(problem, problem.ranks[0].device) == pytest.approx(0.23)
    first_s, last_s, vote_s = exposed_ring_s(problem, ["one", "two"])
    assert (first_s, last_s, vote_s) == pytest.approx((5.77, 1.43, 0.0))
    steep, gentle = lines(problem, problem.ranks[0].device, bucket_rings_s(problem, ["one", "two"]))
    assert steep.after_s(10.0) == pytest.approx(5.77 - 2.3)
    assert gentle.after_s(10.0) == pytest.approx(1.43)


def test_what_was_not_measured_is_taken_as_even():
    problem = problem_of(gradient_bytes=10 << 22)
    device = problem.ranks[0].device
    assert num_buckets(problem) == 10
    assert ready_parts(problem, device) == pytest.approx([part / 10 for part in range(1, 11)])
    rings_s = bucket_rings_s(problem, ["one", "two"])
    assert [round(line.hidden, 6) for line in lines(problem, device, rings_s)] == [0.9, 0.0]
    # Sizes that are known, on a device where nobody looked when they are complete.
    sized = problem_of((3_000_000, 1_000_000))
    assert ready_parts(sized, sized.ranks[0].device) == pytest.approx([0.75, 1.0])


def test_a_bucket_in_between_can_be_the_one_that_counts():
    problem = problem_of((10, 4_000_000, 10), ((0.1, 0.9, 1.0),) * 2)
    rings_s = bucket_rings_s(problem, ["one", "two"])
    found = lines(problem, problem.ranks[0].device, rings_s)
    assert max(line.after_s(5.0) for line in found) == pytest.approx(4.0 - 0.5, abs=1e-4)
    assert len(found) == 3
