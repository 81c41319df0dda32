"""Gathers the facts about this host: devices, versions, limits, names, ports, variables.

The one idea: looking is separate from judging. Everything here only reads, waits a bounded time, and puts down as a
remark what it could not see.
"""

import os
import platform
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import psutil

import ragtag
from ragtag.core.within import within
from ragtag.doctor.accelerators import nvidia_devices
from ragtag.doctor.facts import Device, HostFacts, Port, Torch
from ragtag.doctor.interfaces import interfaces, resolve
from ragtag.doctor.limits import limits
from ragtag.doctor.torch_facts import ask_torch

TORCH_TIMEOUT_S = 60.0
"""A first import from a slow disk takes tens of seconds."""
_RESOLVE_TIMEOUT_S = 2.0
_DEFAULT_MASTER_PORT = 29500

VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "http_proxy",
    "https_proxy",
)


def host_facts(
    environ: Mapping[str, str] = os.environ, *, root: Path = Path("/"), torch_timeout_s: float = TORCH_TIMEOUT_S
) -> HostFacts:
    """Return the facts about this host; takes as long as `import torch` does, at most `torch_timeout_s` plus 15 s."""
    # First: how the ports look must not depend on what we do meanwhile.
    ports = master_ports(environ)
    torch = ask_torch(torch_timeout_s, environ)
    driver = nvidia_devices(environ)
    host = socket.gethostname()
    master = environ.get("MASTER_ADDR", "")
    allowed = limits(root)
    return HostFacts(
        host=host,
        ragtag=ragtag.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch,
        devices=known_devices(driver.devices, torch) or (cpu_device(root),),
        cores=os.cpu_count() or 1,
        cores_allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota_cores=allowed.cpu_quota_cores,
        memory_bytes=psutil.virtual_memory().total,
        memory_limit_bytes=allowed.memory_limit_bytes,
        open_files=allowed.open_files,
        open_files_most=allowed.open_files_most,
        shared_memory_bytes=allowed.shared_memory_bytes,
        resolves_to=_addresses(host),
        master_resolves_to=_addresses(master) if master else (),
        interfaces=interfaces(),
        ports=ports,
        environment={name: environ[name] for name in VARIABLES if environ.get(name)},
        remarks=driver.remarks,
    )


def known_devices(driver: tuple[Device, ...], torch: Torch) -> tuple[Device, ...]:
    """Return what the driver lists, else what torch lists."""
    return driver or torch.devices


def cpu_device(root: Path = Path("/")) -> Device:
    """Return the CPU as a device; its UUID is a hash of the machine's id, which should not be shown itself."""
    facts = {}
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags", facts.get("Features", "")).split()
    dtypes = ("fp32", "bf16") if {"avx512_bf16", "amx_bf16", "bf16"} & set(flags) else ("fp32",)
    machine = ""
    with suppress(OSError):
        machine = (root / "etc/machine-id").read_text().strip()
    return Device(
        kind="cpu",
        name=facts.get("model name") or platform.processor() or platform.machine(),
        uuid=f"CPU-{blake2b(machine.encode(), digest_size=6).hexdigest()}" if machine else "",
        memory_bytes=psutil.virtual_memory().total,
        dtypes=dtypes,
    )


def master_ports(environ: Mapping[str, str]) -> tuple[Port, ...]:
    """Return whether the port where ranks would meet on this host is free, and who has it."""
    text = environ.get("MASTER_PORT", "")
    number = int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else 0
    number, setting = (number, "MASTER_PORT") if number else (_DEFAULT_MASTER_PORT, "")
    free = is_free(number)
    return (Port(number=number, setting=setting, free=free, holder="" if free else holder_of(number)),)


def is_free(port: int) -> bool:
    """Return whether a server could listen at `port` on all of this host's IPv4 addresses."""
    with socket.socket() as probe:
        # As servers do, so that a connection that was just closed does not count; Windows means another thing by it.
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def holder_of(port: int) -> str:
    """Return who listens at `port`, as "python (pid 123)"; empty: we may not know."""
    with suppress(psutil.Error, OSError, RuntimeError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return ""
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def _addresses(name: str) -> tuple[str, ...]:
    try:
        return within(_RESOLVE_TIMEOUT_S, lambda: resolve(name, 0))
    except (OSError, UnicodeError):  # TimeoutError is an OSError; a label of more than 63 characters a UnicodeError
        return ()
