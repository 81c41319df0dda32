from itertools import combinations

import pytest

from ragtag.core.cluster import Cluster, Device, Emulation, Link
from ragtag.cost.problem import assemble, profile_from_speeds
from ragtag.plan.search import search
from ragtag.plan.verdict import verdicts


def judged(*devices, links=(), gradient_bytes=4_000_000, batch=120):
    cluster = Cluster(devices=devices, links=links, emulation=Emulation(sample_s=0.01, optimizer_s=0.002))
    problem = assemble(profile_from_speeds(cluster, global_batch_size=batch, gradient_bytes=gradient_bytes), cluster)
    choice = search(problem)
    return {verdict.device: verdict for verdict in verdicts(problem, choice)}, choice


def test_a_device_adds_about_its_part_of_the_speed():
    found, _ = judged(Device(name="big"), Device(name="small", speed=0.25), gradient_bytes=0)
    assert found["small"].keep
    # Alone 1.202 s a step; together 96 samples of 120 are left for the big one.
    assert found["small"].gain == pytest.approx(1.202 / 0.970 - 1, abs=0.01)
    assert found["small"].text.startswith("small: +2")
    assert found["big"].gain > 3


def test_a_device_that_costs_more_than_it_adds_is_to_be_left_out():
    slow = Link(between=("desk", "sofa"), bandwidth_bytes_per_s=5e6, latency_s=0.002)
    found, choice = judged(
        Device(name="desk", host="desk"), Device(name="laptop", host="sofa", speed=0.1), links=(slow,)
    )
    laptop = found["laptop"]
    assert not laptop.keep
    assert laptop.gain < 0
    assert "leave it out" in laptop.text
    whole = next(one for one in choice.candidates if one.name == "replicated, all devices")
    assert laptop.gain == pytest.approx(whole.rate / choice.best.rate - 1)


def test_equal_devices_are_judged_once():
    found, _ = judged(Device(name="box", count=3), Device(name="other", speed=0.5))
    assert found["box-2"].count == 3
    assert set(found) == {"box-2", "other"}


def test_money_is_named_where_there_are_prices():
    found, _ = judged(
        Device(name="own"), Device(name="rented", speed=0.5, price_per_hour=3.6), gradient_bytes=0, batch=90
    )
    rented = found["rented"]
    # 60 samples take 0.602 s on the own one, 30 take 0.604 s on the rented one, at a tenth of a cent a second.
    assert rented.usd_per_million_samples == pytest.approx(0.001 * 0.604 / 90 * 1e6, rel=0.01)
    assert rented.usd_without is None
    assert "$6.71 a million samples with it, $0 without" in rented.text


def test_the_only_device_is_needed():
    found, _ = judged(Device(name="only"))
    assert found["only"].text == "only: needed, nothing runs without it"


def test_the_only_device_of_the_plan_is_judged_by_the_best_of_many_others():
    """More numbers by host than are all looked at, and the plan is one device: without it nothing is near."""
    slow = [
        Link(between=(f"h{first}", f"h{second}"), bandwidth_bytes_per_s=1e4, latency_s=0.01)
        for first, second in combinations(range(14), 2)
    ]
    devices = [Device(name=f"d{index}", host=f"h{index}", speed=1.0 if index == 3 else 0.25) for index in range(14)]
    found, choice = judged(*devices, links=tuple(slow))
    assert [part.device for part in choice.best.candidate.parts] == ["d3"]
    assert found["d3"].keep
    assert found["d3"].gain == pytest.approx(3.0, rel=0.1)
