import msgspec
import numpy as np
import pytest

from ragtag.core.cluster_file import parse_cluster
from ragtag.core.errors import SettingError
from ragtag.core.profile import DeviceProfile, LinkProfile, Memory, ModelFacts, Profile, Timing
from ragtag.cost.candidate import Candidate, Part
from ragtag.cost.step import predict_on
from ragtag.emulate.schedule import DeviceSchedule
from ragtag.sim.baselines import EqualBatches
from ragtag.sim.cluster import virtual_cluster
from ragtag.sim.run import simulate

from .clusters import four

CLUSTER = """
[emulate]
jitter = 0
[[device]]
name = "box"
host = "one"
count = 2
[[device]]
name = "far"
host = "two"
"""


def profile(capacity_bytes=None) -> Profile:
    def device(name, factor):
        return DeviceProfile(
            name=name,
            timings=tuple(Timing(samples=n, seconds=factor * s) for n, s in ((1, 0.03), (4, 0.05), (16, 0.18))),
            optimizer_s=0.01 * factor,
            fixed_s=0.002,
            capacity_bytes=capacity_bytes,
            memory=Memory(fixed_bytes=1000, per_sample_bytes=100),
        )

    return Profile(
        model=ModelFacts(
            name="m",
            shape_hash="x",
            parameters=10_000_000,
            parameter_bytes=40_000_000,
            gradient_bytes=40_000_000,
            optimizer_bytes=80_000_000,
        ),
        global_batch_size=48,
        devices=(device("box", 1.0), device("far", 2.0)),
        links=(LinkProfile(between=("one", "two"), bandwidth_bytes_per_s=125e6, latency_s=1e-3),),
    )


def test_a_simulated_step_takes_what_the_cost_model_predicts():
    cluster = virtual_cluster(parse_cluster(CLUSTER), profile())
    even = EqualBatches(cluster)
    even.attend(np.ones(3, dtype=bool))
    parts = tuple(Part(device=rank.name, samples=16, micro_batch=16) for rank in cluster.problem.ranks)
    predicted = predict_on(cluster.problem, Candidate(name="even", layout="replicated", parts=parts))
    block = even.block(1, 1, 0.0)
    assert predicted.comm_s > 0
    assert block.wall_s[0] == pytest.approx(predicted.step_s, rel=1e-9)
    assert block.comm_s[0] == pytest.approx(predicted.comm_s, rel=1e-9)
    assert 48 / block.wall_s[0] / cluster.solo_samples_per_s.sum() == pytest.approx(predicted.eta, rel=1e-9)


def test_unequal_buckets_are_hidden_as_far_as_the_cost_model_says():
    measured = profile()
    facts = msgspec.structs.replace(measured.model, bucket_bytes=(4_000_000, 35_000_000, 1_000_000))
    ready = ((0.2, 0.7, 1.0), (0.1, 0.95, 1.0))
    devices = tuple(
        msgspec.structs.replace(device, bucket_ready=parts) for device, parts in zip(measured.devices, ready)
    )
    measured = msgspec.structs.replace(measured, model=facts, devices=devices)
    cluster = virtual_cluster(parse_cluster(CLUSTER), measured)
    even = EqualBatches(cluster)
    even.attend(np.ones(3, dtype=bool))
    parts = tuple(Part(device=rank.name, samples=16, micro_batch=16) for rank in cluster.problem.ranks)
    predicted = predict_on(cluster.problem, Candidate(name="even", layout="replicated", parts=parts))
    assert even.block(1, 1, 0.0).wall_s[0] == pytest.approx(predicted.step_s, rel=1e-9)


def test_a_device_with_little_memory_has_small_micro_batches():
    cluster = virtual_cluster(parse_cluster(CLUSTER), profile(capacity_bytes=1450))
    assert set(cluster.memory) == {4}
    assert cluster.forwards((16, 16, 15)) == (4, 4, 4)
    assert cluster.work_s((16, 9, 0))[0].tolist() == pytest.approx([0.2, 0.13, 0.0])


def test_units_are_computed_one_at_a_time_and_never_cut():
    measured = profile()
    measured = msgspec.structs.replace(measured, model=msgspec.structs.replace(measured.model, unit=5))
    cluster = virtual_cluster(parse_cluster(CLUSTER), measured)
    assert cluster.forwards((15, 20, 13)) == (3, 4, 3)
    # 0.05 s for four samples and 0.13 / 12 s for the fifth.
    assert cluster.work_s((15, 0, 0))[0][0] == pytest.approx(3 * (0.05 + 0.13 / 12))
    result = simulate("ragtag", cluster, steps=40)
    assert result.samples == 40 * 48
    for each in result.shares:
        assert sum(each.shares) == 48
        assert sum(share % 5 for share in each.shares) in (0, 3)


def test_memory_for_less_than_a_unit_is_named():
    measured = profile(capacity_bytes=1450)
    measured = msgspec.structs.replace(measured, model=msgspec.structs.replace(measured.model, unit=5))
    with pytest.raises(SettingError, match=r"'box-0' has no memory for training 5 samples at a time"):
        virtual_cluster(parse_cluster(CLUSTER), measured)


def test_a_device_without_memory_is_named():
    with pytest.raises(SettingError, match=r"home.toml: 'box-0' has no memory"):
        virtual_cluster(parse_cluster(CLUSTER), profile(capacity_bytes=1050), source="home.toml")


def test_nothing_says_what_work_costs():
    with pytest.raises(SettingError, match="sample_ms"):
        virtual_cluster(parse_cluster('[[device]]\nname = "a"'))


@pytest.mark.parametrize("emulate", ["jitter = 0.2", 'jitter = 0.2\njitter_per = "micro_batch"\nmicro_batch_ms = 3'])
def test_virtual_devices_take_what_emulated_ones_do(emulate):
    cluster = four(emulate, b="flip = {period = 3, speed = 0.1}", c="drift = [{step = 4, speed = 1}]", micro_batch=4)
    emulation = parse_cluster(f"[emulate]\nsample_ms = 40\n{emulate}\n[[device]]\nname = 'a'").emulation
    shares = (8, 4, 12, 2)
    work_s, _ = cluster.work_s(shares)
    took = work_s * cluster.factors(1, 8, shares)
    for rank, (device, share) in enumerate(zip(cluster.devices, shares)):
        schedule = DeviceSchedule(device=device, emulation=emulation)
        for step in range(1, 9):
            sizes = [4] * (share // 4) or [share]
            expected = sum(schedule.compute_s(step, index, size) for index, size in enumerate(sizes))
            assert took[step - 1, rank] == pytest.approx(expected, rel=1e-4)
