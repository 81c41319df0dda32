"""This host's NVIDIA devices as the driver knows them, without opening them: through NVML, else through nvidia-smi.

The one idea: names and order differ between tools, UUIDs don't; so a device is known by its UUID.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ragtag.doctor.facts import Device
from ragtag.doctor.torch_facts import cuda_dtypes

_QUERY = "index,uuid,name,memory.total,driver_version,compute_cap"
_TOOL_TIMEOUT_S = 8.0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, and what could not be looked at."""

    devices: tuple[Device, ...] = ()
    remarks: tuple[str, ...] = ()


def nvidia_devices(
    environ: Mapping[str, str], load_nvml: Callable[[], Any] | None = None, run: Callable[..., Any] = subprocess.run
) -> Found:
    """Return the NVIDIA devices, whatever CUDA_VISIBLE_DEVICES hides. A driver that fails is a remark.

    `load_nvml` returns the module pynvml or raises ImportError.
    """
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    try:
        return _from_nvml((load_nvml or _load_nvml)())
    except ImportError:
        if tool is None:
            return Found()
        remark = "nvidia-ml-py is not installed; asked nvidia-smi instead (pip install nvidia-ml-py)"
        found = _from_tool(tool, run)
        return Found(devices=found.devices, remarks=(remark, *found.remarks))
    except Exception as error:  # NVMLError: there is no driver here, or it is broken
        if tool is None:
            return Found()
        found = _from_tool(tool, run)
        return found if found.devices else Found(remarks=(f"NVML: {error}", *found.remarks))


def _load_nvml() -> Any:
    import pynvml  # pyright: ignore[reportMissingImports]

    return pynvml


def _from_nvml(nvml: Any) -> Found:
    nvml.nvmlInit()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            capability = ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle)))
            devices.append(
                Device(
                    kind="cuda",
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    index=index,
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                    driver=driver,
                    capability=capability,
                    dtypes=cuda_dtypes(capability),
                )
            )
        return Found(devices=tuple(devices))
    finally:
        nvml.nvmlShutdown()


def _from_tool(tool: str, run: Callable[..., Any]) -> Found:
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        listed = run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Found(remarks=(f"nvidia-smi did not answer: {error}",))
    if listed.returncode != 0:
        said = (listed.stdout + listed.stderr).strip().splitlines()[:1] or ["no reason given"]
        return Found(remarks=(f"nvidia-smi failed with status {listed.returncode}: {said[0]}",))
    devices = []
    for line in listed.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].isdigit():
            continue
        index, uuid, name, memory, driver, capability = fields
        devices.append(
            Device(
                kind="cuda",
                name=name,
                index=int(index),
                uuid=uuid,
                # A device without memory of its own says [N/A].
                memory_bytes=int(memory) << 20 if memory.isdigit() else 0,
                driver=driver,
                capability=capability,
                dtypes=cuda_dtypes(capability),
            )
        )
    return Found(devices=tuple(devices))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
