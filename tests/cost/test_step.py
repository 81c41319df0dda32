import pytest

from ragtag.core.cluster import Cluster, Device, Emulation, Link
from ragtag.core.errors import SettingError
from ragtag.core.profile import Block, DeviceProfile, LinkProfile, ModelFacts, Profile, Timing
from ragtag.core.values import from_json, to_json
from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.problem import assemble, profile_from_speeds
from ragtag.cost.step import noise, predict

MODEL = ModelFacts(name="m", shape_hash="", parameters=1, parameter_bytes=400, gradient_bytes=400, optimizer_bytes=800)


def profile(*devices, links=(), blocks=(), batch=12, model=MODEL):
    return Profile(model=model, global_batch_size=batch, devices=devices, links=links, blocks=blocks)


def device(name, per_sample_s, **fields):
    timings = tuple(Timing(samples=size, seconds=size * per_sample_s) for size in (1, 2, 64))
    return DeviceProfile(name=name, timings=timings, **fields)


def replicated(*parts, **fields):
    return Candidate(
        name="x",
        layout="replicated",
        parts=tuple(Part(device=n, samples=s, micro_batch=m) for n, s, m in parts),
        **fields,
    )


CLUSTER = Cluster(devices=(Device(name="a", host="one", price_per_hour=3.6), Device(name="b", host="two")))
LINK = LinkProfile(between=("one", "two"), bandwidth_bytes_per_s=400.0, latency_s=0.5)


def test_a_step_is_the_slowest_device_the_ring_and_the_vote():
    measured = profile(device("a", 0.1, optimizer_s=0.2), device("b", 0.3), links=(LINK,))
    predicted = predict(measured, CLUSTER, replicated(("a", 8, 8), ("b", 4, 4)))
    # a: 0.8 + 0.2, b: 1.2; one bucket, so nothing hides: ring 2 * 1/2 * 400/400 + 2 * 0.5; vote 0.5.
    assert predicted.step_s == pytest.approx(1.2 + 1 + 1 + 0.5)
    assert predicted.comm_s == pytest.approx(2.5)
    assert [one.wait_s for one in predicted.devices] == pytest.approx([0.2, 0.0])
    assert predicted.samples_per_s == pytest.approx(12 / 3.7)
    assert predicted.eta == pytest.approx(12 / 3.7 / (12 / 1.4 + 12 / 3.6))
    assert predicted.usd_per_million_samples == pytest.approx(1e-3 * 3.7 / 12 * 1e6)


def test_a_reduction_in_many_buckets_hides_behind_the_last_backward():
    model = ModelFacts(
        name="m", shape_hash="", parameters=1, parameter_bytes=1, gradient_bytes=40 << 20, optimizer_bytes=0
    )
    link = LinkProfile(between=("one", "two"), bandwidth_bytes_per_s=float(40 << 20), latency_s=0.0)
    measured = profile(device("a", 1.0), device("b", 1.0), links=(link,), model=model)
    predicted = predict(measured, CLUSTER, replicated(("a", 6, 6), ("b", 6, 6)))
    # Ten buckets of 0.1 s each; the backward of 4 s hides all but the last.
    assert predicted.comm_s == pytest.approx(0.1)
    small = predict(measured, CLUSTER, replicated(("a", 6, 1), ("b", 6, 1)))
    # The last micro-batch has 2/3 s of backward, of which the buckets but the first may use 9/10.
    assert small.comm_s == pytest.approx(1 - 0.9 * 2 / 3)


def test_parts_of_a_step_add_up_for_every_device():
    measured = profile(device("a", 0.1, fixed_s=0.3, jitter=0.2), device("b", 0.3, jitter=0.2), links=(LINK,))
    predicted = predict(measured, CLUSTER, replicated(("a", 10, 4), ("b", 2, 2)))
    for one in predicted.devices:
        whole = one.compute_s + one.constant_s + one.wait_s + predicted.comm_s
        assert whole == pytest.approx(predicted.step_s)
    assert from_json(type(predicted), to_json(predicted)) == predicted


def test_noise_grows_with_the_number_of_devices_until_pulling_is_better():
    assert noise([0.0, 0.0]) == 1
    assert noise([0.01]) < noise([0.01] * 2) < noise([0.01] * 4)
    assert noise([0.3] * 4) == noise([0.3] * 40)
    # Measured on four real processes with pulled work (DESIGN.md, section 4).
    assert 1 / noise([0.3] * 4) == pytest.approx(0.93, abs=0.01)


def test_a_pipeline_of_two_stages():
    blocks = tuple(
        Block(name=str(i), forward_s=1.0, backward_s=2.0, parameter_bytes=100, activation_bytes=10, output_bytes=0)
        for i in range(4)
    )
    measured = profile(device("a", 0.1), device("b", 0.3), blocks=blocks)
    parts = (
        Part(device="a", samples=12, micro_batch=3, blocks=(0, 3)),
        Part(device="b", samples=12, micro_batch=3, blocks=(3, 4)),
    )
    predicted = predict(measured, None, Candidate(name="p", layout="pipeline", parts=parts))
    # Stages take 0.3 * 3/4 and 0.9 * 1/4 = 0.225 each; 4 micro-batches through 2 stages: 5 beats, and two messages.
    assert predicted.step_s == pytest.approx(5 * 0.225, abs=2e-4)
    # State is (400 + 400 + 800) / 400 bytes for each of parameters; two micro-batches are in flight in the first stage.
    assert [one.memory_bytes for one in predicted.devices] == [4 * 300 + 2 * 3 * 30, 4 * 100 + 3 * 10]


def test_speeds_give_a_profile():
    cluster = Cluster(
        devices=(Device(name="box", count=2), Device(name="slow", speed=0.25)),
        emulation=Emulation(sample_s=0.1, micro_batch_s=0.2, optimizer_s=0.3),
    )
    measured = profile_from_speeds(cluster, global_batch_size=8)
    predicted = predict(measured, cluster, replicated(("box-0", 4, 4), ("box-1", 3, 2), ("slow", 1, 1)))
    assert [one.compute_s for one in predicted.devices] == pytest.approx([0.6, 0.4 + 0.3, 1.2])
    assert predicted.devices[2].constant_s == pytest.approx(1.2)


def test_speeds_without_a_measure_are_refused_with_what_to_write():
    with pytest.raises(SettingError, match="sample_ms = 40"):
        profile_from_speeds(Cluster(devices=(Device(name="a"),)), global_batch_size=8)


def test_a_device_that_was_not_measured_is_named():
    with pytest.raises(SettingError, match=r"'labtop'.*Did you mean 'laptop'"):
        assemble(profile(device("laptop", 1.0)), Cluster(devices=(Device(name="labtop"),)))


def test_a_device_of_a_measured_kind_or_entry_is_planned_with_its_numbers():
    measured = profile(device("box-0", 1.0, kind="rtx3090"))
    cluster = Cluster(
        devices=(Device(name="box", count=2), Device(name="new", kind="rtx3090", speed=2.0, memory_bytes=7)),
    )
    ranks = assemble(measured, cluster).ranks
    assert ranks[1].device.timings == measured.devices[0].timings
    assert ranks[2].device.timings[0].seconds == 0.5
    assert ranks[2].device.capacity_bytes == 7


def test_what_was_measured_beats_what_the_cluster_file_says_about_a_link():
    described = Cluster(devices=CLUSTER.devices, links=(Link(between=("two", "one"), bandwidth_bytes_per_s=1.0),))
    problem = assemble(profile(device("a", 1.0), device("b", 1.0), links=(LINK,)), described)
    assert problem.link("two", "one") == LINK
    assert (
        assemble(profile(device("a", 1.0), device("b", 1.0)), described).link("one", "two").bandwidth_bytes_per_s == 1
    )
