import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.doctor.diagnose import diagnose
from ragtag.doctor.facts import Port, Torch
from ragtag.doctor.rules_host import chosen_interfaces, host_findings, is_compiled_for
from tests.doctor.cases import HEALTHY, OTHER, P40, RTX3090, changed

WITH_3090 = Torch(version="2.13.0+cu128", devices=(RTX3090,), architectures=("sm_75", "sm_80", "sm_90", "compute_90"))

WITH_BOTH = changed(WITH_3090, devices=(RTX3090, P40), architectures=("sm_61", "sm_86"))


def found(facts, several_hosts=True):
    return {finding.code: finding for finding in host_findings(facts, several_hosts=several_hosts)}


def test_a_healthy_host_has_no_finding():
    assert found(HEALTHY) == {}
    assert found(changed(HEALTHY, devices=(RTX3090,), torch=WITH_3090)) == {}


def environment(**variables):
    return changed(HEALTHY, environment=variables)


CASES = {
    "no torch": (changed(HEALTHY, torch=Torch(problem="No module named torch")), "torch-missing", "error", "torch"),
    "driver hangs": (
        changed(HEALTHY, torch=Torch(version="2.13.0", problem="cuda:0: unknown error")),
        "torch-problem",
        "error",
        "cuda:0",
    ),
    "CPU build on a GPU host": (
        changed(HEALTHY, devices=(RTX3090,)),
        "torch-sees-no-device",
        "error",
        "would run on the CPU",
    ),
    "one hidden": (
        changed(HEALTHY, devices=(RTX3090, P40), torch=WITH_3090, environment={"CUDA_VISIBLE_DEVICES": "GPU-3090"}),
        "device-hidden",
        "note",
        "CUDA_VISIBLE_DEVICES=GPU-3090 shows 1 of 2",
    ),
    "old card": (
        changed(HEALTHY, devices=(P40,), torch=changed(WITH_3090, devices=(P40,))),
        "device-too-old-for-torch",
        "error",
        "GPU-40",
    ),
    "order of unlike devices": (
        changed(HEALTHY, devices=(RTX3090, P40), torch=WITH_BOTH, environment={"CUDA_VISIBLE_DEVICES": "1,0"}),
        "device-order",
        "warning",
        "CUDA_VISIBLE_DEVICES=1,0",
    ),
    "quota": (changed(HEALTHY, cpu_quota_cores=1.5), "cpu-quota", "warning", "1.5 cores"),
    "affinity": (changed(HEALTHY, cores_allowed=4), "cpu-affinity", "note", "4 of 8"),
    "memory": (changed(HEALTHY, memory_limit_bytes=2 * 10**9), "memory-limit", "note", "2 GB"),
    "files": (changed(HEALTHY, open_files=1024), "open-files", "warning", "1024"),
    "docker's /dev/shm": (changed(HEALTHY, shared_memory_bytes=64 * 10**6), "shared-memory", "warning", "64 MB"),
    "name is loopback": (changed(HEALTHY, resolves_to=("127.0.1.1",)), "name-loopback", "error", "127.0.1.1"),
    "master is loopback": (
        changed(environment(MASTER_ADDR="localhost"), master_resolves_to=("127.0.0.1",)),
        "master-loopback",
        "error",
        "MASTER_ADDR=localhost is 127.0.0.1",
    ),
    "master unknown": (environment(MASTER_ADDR="desktpo"), "master-unknown", "error", "MASTER_ADDR=desktpo"),
    "no such interface": (environment(GLOO_SOCKET_IFNAME="eno1"), "interface-variable", "error", "no such interface"),
    "interface down": (environment(GLOO_SOCKET_IFNAME="eth2"), "interface-variable", "error", "eth2 is down"),
    "interface is loopback": (environment(NCCL_SOCKET_IFNAME="=lo"), "interface-variable", "error", "from lo no other"),
    "port is a word": (changed(environment(MASTER_PORT="ssh"), ports=()), "port-wrong", "error", "MASTER_PORT=ssh"),
    "port is taken": (
        changed(HEALTHY, ports=(Port(number=29511, setting="MASTER_PORT", free=False, holder="python (pid 7)"),)),
        "port-busy",
        "error",
        "MASTER_PORT=29511 is taken by python (pid 7)",
    ),
    "default port is taken": (
        changed(HEALTHY, ports=(Port(number=29500, setting="", free=False),)),
        "port-busy",
        "warning",
        "29500",
    ),
    "remark": (changed(HEALTHY, remarks=("nvidia-smi failed",)), "not-seen", "note", "nvidia-smi failed"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rule_finds_its_case_and_nothing_else(case):
    facts, code, severity, words = CASES[case]
    findings = found(facts)
    assert list(findings) == [code]
    assert findings[code].severity == severity
    assert words in findings[code].what
    assert findings[code].where == "alpha"
    assert findings[code].todo


def test_what_to_type_names_what_this_host_has():
    assert "MASTER_ADDR=10.0.0.1" in found(CASES["name is loopback"][0])["name-loopback"].todo
    assert "GLOO_SOCKET_IFNAME=eth0" in found(CASES["no such interface"][0])["interface-variable"].todo
    assert found(CASES["files"][0])["open-files"].todo == "ulimit -n 65536"
    low = changed(HEALTHY, open_files=256, open_files_most=1024)
    assert "nofile" in found(low)["open-files"].todo, "ulimit cannot raise it over the hard limit"


def test_a_loopback_name_matters_only_between_hosts_and_only_where_the_name_is_used():
    facts = CASES["name is loopback"][0]
    assert found(facts, several_hosts=False)["name-loopback"].severity == "note"
    numbers = changed(facts, environment={"MASTER_ADDR": "10.0.0.1"}, master_resolves_to=("10.0.0.1",))
    assert found(numbers)["name-loopback"].severity == "warning"
    assert "master-loopback" not in found(CASES["master is loopback"][0], several_hosts=False)


def test_a_device_hidden_on_purpose_is_no_error():
    facts = changed(HEALTHY, devices=(RTX3090,), environment={"CUDA_VISIBLE_DEVICES": "-1"})
    assert list(found(facts)) == ["device-hidden"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ["eth0", "eth1", "eth2"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^eth", ["lo"]),
        ("^=eth0", ["lo", "eth1", "eth2"]),
        ("eth1,lo", ["lo", "eth1"]),
    ],
)
def test_nccl_takes_prefixes(value, names):
    assert [each.name for each in chosen_interfaces("NCCL_SOCKET_IFNAME", value, HEALTHY.interfaces)] == names


def test_gloo_takes_whole_names():
    assert chosen_interfaces("GLOO_SOCKET_IFNAME", "eth", HEALTHY.interfaces) == ()
    assert [each.name for each in chosen_interfaces("GLOO_SOCKET_IFNAME", "eth1", HEALTHY.interfaces)] == ["eth1"]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ("8.6", ("sm_80",), True),  # binary code of the same major version
        ("8.0", ("sm_86",), False),
        ("9.0", ("sm_80",), False),
        ("9.0", ("sm_80", "compute_80"), True),  # PTX runs on all that is newer
        ("6.1", ("sm_75", "compute_75"), False),
        ("9.0", ("sm_90a",), True),
        ("10.0", ("sm_90a", "sm_100"), True),
        ("12.0", ("sm_100",), False),
        ("8.6", (), True),
    ],
)
def test_which_kernels_run_on_which_device(capability, architectures, runs):
    assert is_compiled_for(capability, architectures) is runs


@given(st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4))
def test_the_diagnosis_is_ok_iff_no_finding_is_an_error_and_errors_come_first(names):
    diagnosis = diagnose([CASES[name][0] for name in names] + [OTHER])
    severities = [finding.severity for finding in diagnosis.findings]
    assert diagnosis.ok == ("error" not in severities)
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
