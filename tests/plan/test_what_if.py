import pytest

from ragtag.core.cluster import Cluster, Device, Emulation, Link
from ragtag.core.errors import SettingError
from ragtag.core.profile import LinkProfile
from ragtag.cost.problem import assemble, profile_from_speeds
from ragtag.plan.search import search
from ragtag.plan.what_if import apply_edit

CLUSTER = Cluster(
    devices=(
        Device(name="tower", host="home", kind="rtx3090", count=2, price_per_hour=0.4),
        Device(name="laptop", host="sofa", speed=0.2),
    ),
    links=(Link(between=("home", "sofa"), bandwidth_bytes_per_s=1e6, latency_s=0.01),),
    emulation=Emulation(sample_s=0.01),
)
PROFILE = profile_from_speeds(CLUSTER, global_batch_size=60, gradient_bytes=1_000_000)


def names(cluster):
    return [device.name for device in cluster.expanded()]


@pytest.mark.parametrize("edit", ["+1 rtx3090", "+1 tower", "+rtx3090"])
def test_one_more_is_like_those_of_its_name_or_kind(edit):
    cluster, profile = apply_edit(edit, CLUSTER, PROFILE)
    assert len(names(cluster)) == 4
    new = cluster.expanded()[-1]
    assert (new.host, new.kind, new.price_per_hour) == ("home", "rtx3090", 0.4)
    faster = search(assemble(profile, cluster)).best.rate
    assert faster > 1.3 * search(assemble(PROFILE, CLUSTER)).best.rate


def test_several_can_be_added_on_a_host_of_their_own_that_is_connected_like_the_others():
    cluster, profile = apply_edit("+2 laptop@attic", CLUSTER, PROFILE)
    assert [device.host for device in cluster.expanded()[-2:]] == ["attic", "attic"]
    assert cluster.link_between("attic", "home").bandwidth_bytes_per_s == 1e6
    assert assemble(profile, cluster).ranks[-1].device.timings == PROFILE.devices[2].timings


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        ("-laptop", ["tower-0", "tower-1"]),
        ("-tower", ["laptop"]),
        ("-tower-1", ["tower-0", "laptop"]),
        ("-home", ["laptop"]),
    ],
)
def test_devices_entries_and_hosts_can_be_taken_away(edit, left):
    cluster, profile = apply_edit(edit, CLUSTER, PROFILE)
    assert names(cluster) == left
    assert len(assemble(profile, cluster).ranks) == len(left)


@pytest.mark.parametrize("edit", ["link home=1Gbit/s", "link sofa-home=1Gbit/s", "link home-sofa = 1Gbit/s"])
def test_another_link_replaces_what_was_described_and_what_was_measured(edit):
    measured = LinkProfile(between=("sofa", "home"), bandwidth_bytes_per_s=9e5, latency_s=0.02)
    profile = type(PROFILE)(model=PROFILE.model, global_batch_size=60, devices=PROFILE.devices, links=(measured,))
    cluster, profile = apply_edit(edit, CLUSTER, profile)
    link = assemble(profile, cluster).link("home", "sofa")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (125e6, 0.02)
    assert cluster.link_between("home", "sofa").bandwidth_bytes_per_s == 125e6


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("laptop", "is not an edit"),
        ("-labtop", "Did you mean 'laptop'"),
        ("+1 rtx3080", "Did you mean 'rtx3090'"),
        ("+0 laptop", "adds nothing"),
        ("link hom=1Gbit/s", "Did you mean 'home'"),
        ("link home=1Gbps", "Write 'Gbit/s' for bits"),
        ("link home=0Mbit/s", "more than nothing"),
    ],
)
def test_what_is_no_edit_is_refused_with_the_fix(edit, said):
    with pytest.raises(SettingError, match=said):
        apply_edit(edit, CLUSTER, PROFILE)


def test_somebody_has_to_stay():
    cluster, profile = apply_edit("-tower", CLUSTER, PROFILE)
    with pytest.raises(SettingError, match="leaves no device"):
        apply_edit("-laptop", cluster, profile)
