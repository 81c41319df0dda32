import pytest

from ragtag.doctor.diagnose import diagnose
from ragtag.doctor.facts import ClockOffset, Interface, Torch
from ragtag.doctor.rules_pair import pair_findings
from tests.doctor.cases import HEALTHY, OTHER, RTX3090, WAY, changed


def found(hosts=(HEALTHY, OTHER), ways=(WAY,), clocks=()):
    return {finding.code: finding for finding in pair_findings(hosts, ways, clocks)}


def test_a_healthy_pair_has_no_finding():
    back = changed(WAY, source="beta", target="alpha", address="10.0.0.1", control=False)
    assert found(ways=(WAY, back)) == {}
    assert diagnose((HEALTHY, OTHER), (WAY, back)).ok


FAILED = changed(WAY, ok=False, latency_s=None)


@pytest.mark.parametrize(
    ("way", "code", "words", "todo"),
    [
        (changed(FAILED, stage="connect", error="no answer in time"), "unreachable", "no answer in time", "ufw allow"),
        (changed(FAILED, stage="connect", error="refused", refused=True), "unreachable", "nothing listens", "--listen"),
        (
            changed(FAILED, stage="connect", error="refused", refused=True, control=False, port=40123),
            "unreachable",
            "40123",
            "ports that the system chooses",
        ),
        (
            changed(FAILED, stage="connect", error="Network is unreachable", interface="", source_address=""),
            "unreachable",
            "no interface that leads there",
            "ip route get 10.0.0.2",
        ),
        (changed(FAILED, stage="answer", error="it hung up"), "unreachable", "no ragtag doctor", "ss -ltnp"),
        (changed(FAILED, stage="token", error="it has another token"), "token", "another token", "--token"),
        (changed(FAILED, stage="bulk", error="no answer in time"), "large-packets", "small packets pass", "ping -M do"),
        (changed(FAILED, stage="report", error="it hung up"), "unreachable", "did not report", "--listen"),
        (
            changed(FAILED, stage="resolve", address="bta", error="Name or service not known", interface=""),
            "name-unknown",
            "bta",
            "getent hosts bta",
        ),
    ],
)
def test_a_pair_that_cannot_talk_is_named_with_address_port_and_what_to_type(way, code, words, todo):
    findings = found((HEALTHY,), (way,))
    assert list(findings) == [code]
    assert findings[code].severity == "error"
    assert findings[code].where == "alpha -> beta"
    assert words in findings[code].what
    assert way.address in findings[code].what + findings[code].todo
    assert str(way.port) in findings[code].what + findings[code].todo or code == "token"
    assert todo in findings[code].todo


def test_an_unreachable_pair_is_named_with_the_interface():
    finding = found((HEALTHY,), (changed(FAILED, stage="connect", error="no answer in time"),))["unreachable"]
    assert "10.0.0.2 port 29470 through interface eth0 (10.0.0.1)" in finding.what


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"ragtag": "0.2.0"}, "ragtag-version", "error"),
        ({"torch": Torch(version="2.12.1+cpu")}, "torch-version", "error"),
        ({"torch": Torch(version="2.13.1+cpu")}, "torch-version", "warning"),
        ({"torch": Torch(version="2.13.0+cu128")}, "torch-build", "note"),
        ({"python": "3.12.1"}, "python-version", "warning"),
        ({"python": "3.11.9"}, None, ""),
        ({"torch": Torch()}, None, ""),  # a finding about that host, not about the pair
        ({"interfaces": (Interface(name="eth0", addresses=("fd00::2",)),)}, "no-common-family", "error"),
        (
            {"interfaces": (Interface(name="eth0", addresses=("10.0.0.2",), mtu=9000),)},
            "mtu",
            "warning",
        ),
        (
            {"interfaces": (Interface(name="eth0", addresses=("172.17.0.2",), mtu=1500),)},
            "translated-address",
            "warning",
        ),
        ({"torch": Torch(version="2.13.0+cpu", devices=(RTX3090, RTX3090))}, "unequal-devices", "note"),
    ],
)
def test_what_differs_between_two_hosts(change, code, severity):
    back = changed(WAY, source="beta", target="alpha", address="10.0.0.1", control=False)
    way = changed(WAY, control=code != "no-common-family")
    findings = found((HEALTHY, changed(OTHER, **change)), (way, back))
    findings.pop("dtypes-differ", None)
    assert list(findings) == ([code] if code else [])
    if code:
        assert findings[code].severity == severity
        assert "beta" in findings[code].where


def test_what_to_install_is_the_examining_hosts_version():
    finding = found((HEALTHY, changed(OTHER, torch=Torch(version="2.12.1"))))["torch-version"]
    assert finding.todo == "pip install torch==2.13.0   (on beta)"


@pytest.mark.parametrize(("offset_s", "uncertainty_s", "named"), [(-5, 0.1, True), (1.5, 0, False), (2.5, 0.6, False)])
def test_a_clock_is_wrong_only_beyond_what_the_way_explains(offset_s, uncertainty_s, named):
    clock = ClockOffset(host="beta", offset_s=offset_s, uncertainty_s=uncertainty_s)
    findings = found(clocks=(clock,))
    assert ("clock" in findings) is named
    if named:
        assert "5.0 s behind" in findings["clock"].what


def test_the_way_leaves_through_another_interface_than_the_variable_says():
    facts = changed(HEALTHY, environment={"GLOO_SOCKET_IFNAME": "eth1"})
    finding = found((facts, OTHER))["interface-differs"]
    assert finding.todo == "export GLOO_SOCKET_IFNAME=eth0   (on alpha)"
    assert found((changed(HEALTHY, environment={"GLOO_SOCKET_IFNAME": "eth0"}), OTHER)) == {}


@pytest.mark.parametrize(
    ("interface", "code"), [("wlp3s0", "wireless"), ("tailscale0", "tunnel"), ("docker0", "tunnel")]
)
def test_slow_kinds_of_interface_are_noted(interface, code):
    assert found(ways=(changed(WAY, interface=interface),))[code].severity == "note"


def test_calling_oneself_is_noticed():
    assert "127.0.0.1" in found(ways=(changed(WAY, address="127.0.0.1", interface="lo"),))["target-loopback"].what


def test_hosts_without_bf16_are_named():
    mixed = changed(HEALTHY, torch=Torch(version="2.13.0+cpu", devices=(RTX3090,)))
    finding = found((mixed, OTHER))["dtypes-differ"]
    assert finding.where == "beta"
