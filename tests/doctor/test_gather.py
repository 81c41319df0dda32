"""What is read from a host, from files and tools that are made for the test."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from ragtag.doctor.accelerators import nvidia_devices
from ragtag.doctor.facts import Torch
from ragtag.doctor.host import cpu_device, host_facts, master_ports
from ragtag.doctor.interfaces import interface_of, interfaces, leads_elsewhere, plain, resolve, way_out
from ragtag.doctor.limits import limits
from ragtag.doctor.torch_facts import ask_torch, cuda_dtypes


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_the_tightest_group_of_version_2_holds(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/run.service\n",
            "sys/fs/cgroup/user.slice/run.service/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/run.service/memory.max": "4000000000\n",
            "sys/fs/cgroup/user.slice/memory.max": "8000000000\n",
        },
    )
    assert (limits(root).cpu_quota_cores, limits(root).memory_limit_bytes) == (1.5, 4_000_000_000)


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert (limits(root).cpu_quota_cores, limits(root).memory_limit_bytes) == (0.5, None)


def test_no_tree_no_limits(tmp_path):
    found = limits(tmp_path)
    assert (found.cpu_quota_cores, found.memory_limit_bytes, found.shared_memory_bytes) == (None, None, None)


def answers(stdout, returncode=0):
    return lambda command, **_: SimpleNamespace(stdout=stdout, stderr="", returncode=returncode)


@pytest.fixture
def with_tool(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    return {"PATH": str(tmp_path)}


def no_nvml():
    raise ImportError


class Nvml:
    def __init__(self, fails=False):
        self.fails, self.open = fails, 0

    def nvmlInit(self):  # noqa: N802
        if self.fails:
            raise RuntimeError("Driver/library version mismatch")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def __getattr__(self, name):
        return {
            "nvmlSystemGetDriverVersion": lambda: b"550.54",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 9),
            "nvmlDeviceGetName": lambda handle: "NVIDIA L4",
            "nvmlDeviceGetUUID": lambda handle: b"GPU-4",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=24 << 30),
        }[name]


def test_devices_come_from_nvml(with_tool):
    nvml = Nvml()
    (device,) = nvidia_devices(with_tool, lambda: nvml).devices
    assert (device.uuid, device.name, device.driver, device.capability) == ("GPU-4", "NVIDIA L4", "550.54", "8.9")
    assert device.memory_bytes == 24 << 30
    assert "fp8" in device.dtypes
    assert nvml.open == 0


def test_devices_come_from_nvidia_smi_where_nvml_is_not_installed(with_tool):
    lines = "0, GPU-1, NVIDIA GeForce RTX 3060, 12288, 550.54, 8.6\n1, GPU-2, Tesla P40, [N/A], 550.54, 6.1\n"
    found = nvidia_devices(with_tool, no_nvml, answers(lines))
    assert [device.uuid for device in found.devices] == ["GPU-1", "GPU-2"]
    assert found.devices[0].memory_bytes == 12288 << 20
    assert found.devices[1].dtypes == ("fp32",)
    assert "nvidia-ml-py is not installed" in found.remarks[0]


def test_a_broken_driver_is_a_remark(with_tool):
    found = nvidia_devices(with_tool, lambda: Nvml(fails=True), answers("couldn't communicate", 9))
    assert found.devices == ()
    assert "version mismatch" in found.remarks[0]
    assert "status 9: couldn't communicate" in found.remarks[1]


def test_a_tool_that_hangs_is_a_remark(with_tool):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    assert "did not answer" in nvidia_devices(with_tool, no_nvml, hang).remarks[-1]


def test_no_driver_is_nothing_to_say():
    found = nvidia_devices({"PATH": "/nonexistent"}, no_nvml)
    assert (found.devices, found.remarks) == ((), ())


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [("6.0", "fp32 fp16"), ("6.1", "fp32"), ("7.5", "fp32 fp16"), ("9.0", "fp32 fp16 bf16 tf32 fp8"), ("", "fp32")],
)
def test_dtypes_by_capability(capability, dtypes):
    assert cuda_dtypes(capability) == tuple(dtypes.split())


def with_fake_torch(directory, content):
    (directory / "torch.py").write_text(content)
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(directory), "src"])}


def test_torch_is_asked_in_a_child(tmp_path):
    content = (
        "from types import SimpleNamespace\nprint('a library that greets')\n__version__ = '2.12.0'\n"
        "cuda = SimpleNamespace(is_available=lambda: False)\n"
    )
    assert ask_torch(30, with_fake_torch(tmp_path, content)) == Torch(version="2.12.0")


@pytest.mark.parametrize(
    ("content", "words"),
    [("raise OSError('libcudart.so: cannot open')", "libcudart.so"), ("import os; os._exit(139)", "status 139")],
)
def test_a_torch_that_does_not_load_is_a_problem_in_words(tmp_path, content, words):
    found = ask_torch(30, with_fake_torch(tmp_path, content))
    assert found.version == ""
    assert words in found.problem


def test_a_torch_that_hangs_is_given_up(tmp_path):
    assert "took over 0.5 s" in ask_torch(0.5, with_fake_torch(tmp_path, "import time; time.sleep(60)")).problem


def test_this_host(tmp_path):
    fake = "__version__ = '2.12.0'\nfrom types import SimpleNamespace\n"
    environ = with_fake_torch(tmp_path, fake + "cuda = SimpleNamespace(is_available=lambda: False)\n")
    facts = host_facts(environ | {"MASTER_ADDR": "127.0.0.1"})
    assert facts.host == socket.gethostname()
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.torch.version == "2.12.0"
    assert facts.cores_allowed >= 1
    assert facts.devices
    assert any("127.0.0.1" in each.addresses for each in facts.interfaces)
    assert facts.master_resolves_to == ("127.0.0.1",)
    assert facts.environment["MASTER_ADDR"] == "127.0.0.1"
    assert msgspec.json.decode(msgspec.json.encode(facts), type=type(facts)) == facts


def test_the_machine_id_itself_is_not_shown(tmp_path):
    root = write(
        tmp_path, {"etc/machine-id": "0123456789abcdef\n", "proc/cpuinfo": "model name\t: Some CPU\nflags : avx2\n"}
    )
    device = cpu_device(root)
    assert (device.name, device.dtypes) == ("Some CPU", ("fp32",))
    assert device.uuid.startswith("CPU-")
    assert "0123456789" not in device.uuid


def test_a_busy_port_is_seen_and_its_holder_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        (port,) = master_ports({"MASTER_PORT": str(number)})
        assert (port.number, port.setting, port.free) == (number, "MASTER_PORT", False)
        assert port.holder == "" or f"pid {os.getpid()}" in port.holder
    assert master_ports({"MASTER_PORT": str(number)})[0].free


def test_the_way_out():
    known = interfaces()
    name, address = way_out("127.0.0.1", known)
    assert address == "127.0.0.1"
    assert name == interface_of("127.0.0.1", known) != ""


def test_addresses_in_one_spelling():
    assert plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain("fe80::1%eth0") == "fe80::1"
    assert resolve("127.0.0.1", 1) == ("127.0.0.1",)
    assert [leads_elsewhere(address) for address in ("10.0.0.1", "fd00::1", "fe80::1", "127.0.1.1")] == [
        True,
        True,
        False,
        False,
    ]
