"""What the system lets a process of this host use: CPU time, memory, open files, shared memory.

The one idea: a container's limits are in the cgroup tree and nowhere else; every group from the process's own up to the
root counts, and the tightest holds. Version 1 and 2 are read.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a huge number where there is no limit."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """As in `HostFacts`."""

    cpu_quota_cores: float | None
    memory_limit_bytes: int | None
    open_files: int
    open_files_most: int
    shared_memory_bytes: int | None


def limits(root: Path = Path("/")) -> Limits:
    """Return this process's limits; /proc, /sys and /dev are under `root`."""
    soft, hard = _open_files()
    return Limits(
        cpu_quota_cores=min(_quotas(root), default=None),
        memory_limit_bytes=min(_memory_limits(root), default=None),
        open_files=soft,
        open_files_most=hard,
        shared_memory_bytes=_shared_memory_bytes(root / "dev/shm"),
    )


def _quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    files = [group / "memory.max" for group in _groups(root, "")]
    files += [group / "memory.limit_in_bytes" for group in _groups(root, "memory")]
    for file in files:
        text = _read(file)
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            yield int(text)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's group of version 1's `controller` (empty: version 2's) and all above it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        names = [name for name in (controllers, controller) if name] if controller else ["", "unified"]
        for name in dict.fromkeys(names):
            top = root / "sys/fs/cgroup" / name
            inside = [part for part in path.split("/") if part not in ("", "..")]
            # Inside a container the path may be the host's and absent here: then only the top is looked at.
            yield from (top.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _open_files() -> tuple[int, int]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 0, 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    return (0 if soft == infinite else soft), (0 if hard == infinite else hard)


def _shared_memory_bytes(directory: Path) -> int | None:
    try:
        found = os.statvfs(directory)
    except (OSError, AttributeError):
        return None
    return found.f_blocks * found.f_frsize
