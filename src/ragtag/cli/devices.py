"""Counts this machine's accelerators without importing torch, which would take seconds and open devices.

The one idea: ask the driver's own tool first, then the files it leaves in /proc, /dev and /sys.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def num_accelerators(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return the number of NVIDIA or AMD accelerators that a worker of this `environ` would see; 0: none.

    `root` is where /proc, /dev and /sys are.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            chosen = [device.strip() for device in environ[name].split(",") if device.strip()]
            # As CUDA does: an invalid entry hides itself and all after it.
            valid = [index for index, device in enumerate(chosen) if device.startswith("-")]
            return min(valid, default=len(chosen))
    return _nvidia(environ, root) or _amd(root)


def _nvidia(environ: Mapping[str, str], root: Path) -> int:
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=True)
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        except (OSError, subprocess.SubprocessError):
            pass  # A driver that does not answer; what it left in /proc says more.
    listed_by_driver = list(root.glob("proc/driver/nvidia/gpus/*"))
    return len(listed_by_driver) or len(list(root.glob("dev/nvidia[0-9]*")))


def _amd(root: Path) -> int:
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(node.read_text().strip() not in ("", "0") for node in nodes)
