import pytest

from ragtag.core.cluster import Cluster, Device, DriftPoint, Emulation, Flip, Link, Stall
from ragtag.core.cluster_file import load_cluster, parse_cluster
from ragtag.core.errors import SettingError
from ragtag.core.values import from_json, to_json

HOME = """
[emulate]
sample_ms = 40
micro_batch_ms = 1
optimizer_ms = 12.5
fixed_ms = 2
jitter = 0.3
jitter_per = "micro_batch"
seed = 7

[[device]]
name = "box"
host = "desk"
memory = "24GB"
count = 2
price_per_hour = 0.5

[[device]]
name = "laptop"
host = "sofa"
kind = "cuda"
speed = 0.25
drift = [{step = 50, speed = 0.6}, {step = 90, speed = 1}]
drift_kind = "step"
flip = {period = 5, speed = 0.5}
stall = [{step = 12, seconds = 2.0}]

[[link]]
between = ["desk", "sofa"]
bandwidth = "100Mbit/s"
latency = "20ms"
"""


def test_everything_in_a_file_is_read():
    cluster = parse_cluster(HOME)
    assert cluster.devices == (
        Device(name="box", host="desk", memory_bytes=24 * 10**9, count=2, price_per_hour=0.5),
        Device(
            name="laptop",
            host="sofa",
            kind="cuda",
            speed=0.25,
            drift=(DriftPoint(step=50, speed=0.6), DriftPoint(step=90, speed=1)),
            drift_kind="step",
            flip=Flip(period=5, speed=0.5),
            stall=(Stall(step=12, micro_batch=0, seconds=2.0),),
        ),
    )
    assert cluster.links == (Link(between=("desk", "sofa"), bandwidth_bytes_per_s=12.5e6, latency_s=0.02),)
    assert cluster.emulation == Emulation(
        sample_s=0.04,
        micro_batch_s=0.001,
        optimizer_s=0.0125,
        fixed_s=0.002,
        jitter=0.3,
        jitter_per="micro_batch",
        seed=7,
    )


def test_one_name_is_a_whole_device():
    assert parse_cluster('[[device]]\nname = "box"') == Cluster(devices=(Device(name="box"),))


def test_json_round_trip():
    cluster = parse_cluster(HOME)
    assert from_json(Cluster, to_json(cluster)) == cluster


def test_count_expands_to_single_devices_in_order():
    expanded = parse_cluster(HOME).expanded()
    assert [device.name for device in expanded] == ["box-0", "box-1", "laptop"]
    assert {device.count for device in expanded} == {1}
    assert expanded[1].memory_bytes == 24 * 10**9


def test_a_link_is_found_from_both_ends():
    cluster = parse_cluster(HOME)
    assert cluster.link_between("desk", "sofa") is cluster.link_between("sofa", "desk") is cluster.links[0]
    assert cluster.link_between("desk", "desk") is None


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("speed = 0.25", "sped = 0.25", r"line 22, \[\[device\]\]: sped: no such key. Did you mean 'speed'"),
        ("speed = 0.25", "speed = -1", "line 22.*speed: -1 is not valid.*above 0"),
        ("speed = 0.25", "speed = 0", "above 0"),
        ("speed = 0.25", "speed = inf", "above 0"),
        ("speed = 0.25", "speed = true", "above 0"),
        ("count = 2", "count = 0", "line 15.*count: 0 is not valid.*at least 1"),
        ("count = 2", "count = 1.5", "whole number"),
        ('"24GB"', "24", "line 14.*number with its unit"),
        ('"24GB"', '"0GB"', "more than nothing"),
        ('"24GB"', '"24Gb"', "Did you mean 'GB'"),
        ('"100Mbit/s"', '"100Mb/s"', "line 30.*Write 'Mbit/s'"),
        ('"20ms"', '"20 minutes"', "not a unit of a time"),
        ('["desk", "sofa"]', '["desk", "soffa"]', "line 29.*no device is on host 'soffa'. Did you mean 'sofa'"),
        ('["desk", "sofa"]', '["desk", "desk"]', "two different hosts"),
        ('["desk", "sofa"]', '"desk"', "Expected two hosts"),
        ('name = "laptop"', 'name = "box-1"', "line 19.*'box-1' is also a name of device 1"),
        ('name = "laptop"', "", r"line 18, \[\[device\]\]: 'name' is missing"),
        ('name = "laptop"', 'name = ""', "not empty"),
        ("[[link]]", "[[lnk]]", "lnk: no such table or key. Did you mean 'link'"),
        ("[[link]]", "[link]", r"Write \[\[link\]\]"),
        ("[emulate]", "[[emulate]]", r"write it as a table: \[emulate\]"),
        ("sample_ms = 40", "sample_ms = 0", "line 3.*sample_ms: 0 is not valid"),
        ("jitter = 0.3", "jitter = -0.3", "at least 0"),
        ('"micro_batch"', '"microbatch"', "Did you mean 'micro_batch'"),
        ("{step = 90", "{step = 50", "growing order"),
        ("{step = 90, speed", "{step = 90, sped", "line 23.*drift: sped: no such key"),
        ("period = 5", "period = 0", "flip: period: 0 is not valid"),
        ("{period = 5, speed = 0.5}", "{period = 5}", "'speed' is missing"),
        ("seconds = 2.0", "seconds = -2", "stall: seconds: -2 is not valid"),
        ("sample_ms = 40", "sample_ms = ", "not valid TOML.*line 3"),
    ],
)
def test_a_mistake_is_one_error_with_place_and_fix(right, wrong, says):
    text = HOME.replace(right, wrong, 1)
    assert text != HOME
    with pytest.raises(SettingError, match=says) as caught:
        parse_cluster(text, source="home.toml")
    assert "home.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_second_link_between_the_same_hosts_is_refused():
    with pytest.raises(SettingError, match="already"):
        parse_cluster(HOME + '\n[[link]]\nbetween = ["sofa", "desk"]\n')


def test_a_cluster_without_devices_is_refused():
    with pytest.raises(SettingError, match="no device"):
        parse_cluster("")


def test_file_is_read_and_named_in_errors(tmp_path):
    file = tmp_path / "home.toml"
    with pytest.raises(SettingError, match=r"home.toml cannot be read: No such file"):
        load_cluster(file)
    file.write_text(HOME)
    assert load_cluster(file) == parse_cluster(HOME)
    file.write_bytes(b"name = \xff")
    with pytest.raises(SettingError, match="UTF-8"):
        load_cluster(file)
