"""Imports torch in a process of its own and says what it found: `python -m ragtag.doctor.torch_facts` prints JSON.

The one idea: a broken driver can hang or kill whoever opens a device, so the doctor lets a child do it and waits a
bounded time.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from ragtag.doctor.facts import Device, Torch

_MARK = "ragtag-torch-facts:"
"""Libraries may print, too."""


def ask_torch(timeout_s: float, environ: Mapping[str, str] = os.environ) -> Torch:
    """Return what a child process found within `timeout_s` seconds; a `problem` in words otherwise."""
    command = [sys.executable, "-m", "ragtag.doctor.torch_facts"]
    try:
        child = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Torch(problem=f"`import torch` and counting its devices took over {timeout_s:g} s")
    except OSError as error:
        return Torch(problem=f"cannot start {sys.executable}: {error.strerror}")
    for line in child.stdout.splitlines():
        if line.startswith(_MARK):
            try:
                return msgspec.json.decode(line.removeprefix(_MARK), type=Torch)
            except msgspec.DecodeError:
                break
    last = child.stderr.strip().splitlines()[-1:] or [f"it ended with status {child.returncode}"]
    return Torch(problem=f"`import torch` failed: {last[0]}")


def look_at_torch() -> Torch:
    """Return what torch says in this process; imports it."""
    try:
        import torch
    except Exception as error:
        return Torch(problem=f"`import torch` failed: {type(error).__name__}: {error}")
    if not torch.cuda.is_available():
        return Torch(version=str(torch.__version__))
    kind = "rocm" if torch.version.hip else "cuda"
    devices = []
    for index in range(torch.cuda.device_count()):
        try:
            found: Any = torch.cuda.get_device_properties(index)
        except RuntimeError as error:
            return Torch(version=str(torch.__version__), problem=f"{kind}:{index}: {str(error).splitlines()[0]}")
        capability = f"{found.major}.{found.minor}" if kind == "cuda" else ""
        uuid = str(getattr(found, "uuid", ""))
        devices.append(
            Device(
                kind=kind,
                name=found.name,
                index=index,
                uuid=f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid,
                memory_bytes=found.total_memory,
                capability=capability,
                dtypes=cuda_dtypes(capability) if kind == "cuda" else ("fp32", "fp16", "bf16"),
            )
        )
    return Torch(
        version=str(torch.__version__), devices=tuple(devices), architectures=tuple(torch.cuda.get_arch_list())
    )


def cuda_dtypes(capability: str) -> tuple[str, ...]:
    """Return what a CUDA device of this compute capability computes in hardware.

    CUDA C++ Programming Guide, arithmetic instructions and tensor cores: fp16 from 5.3 (6.1 has it at 1/64 of fp32's
    rate, so it does not count), fast from 7.0; bf16 and tf32 from 8.0; fp8 from 8.9.
    """
    try:
        major, minor = (int(part) for part in capability.split("."))
    except ValueError:
        return ("fp32",)
    version = (major, minor)
    found = ["fp32"]
    if version >= (5, 3) and version not in ((6, 1), (6, 2)):
        found.append("fp16")
    if version >= (8, 0):
        found += ["bf16", "tf32"]
    if version >= (8, 9):
        found.append("fp8")
    return tuple(found)


if __name__ == "__main__":
    print(_MARK + msgspec.json.encode(look_at_torch()).decode(), flush=True)
