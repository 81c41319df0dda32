"""Slows a process down with the kernel's CPU quota: the second, pessimistic regime beside pacing.

The one idea: pacing leaves communication and Python at full speed; a quota slows everything the process does, in
bursts. It needs root and a cgroup tree with the `cpu` controller (version 1 or 2), and says what is missing.

Traps, each seen (`shared/PEERS.md`): a quota below 1 ms a period is refused with EINVAL, which a buffered write can
swallow; a short period can silently run unlimited, so what was written is read back; imports under a quota take
minutes, so enter after them.
"""

import atexit
import os
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ragtag.core.errors import RagtagError, SettingError

PERIOD_US = 100_000
"""Microseconds; the kernel's own default. 5 ms ran unlimited at 15 %."""

_LEAST_QUOTA_US = 1000
_PREFIX = "ragtag-quota-"


class QuotaError(RagtagError, RuntimeError):
    """This machine does not let us set CPU quotas; says why and what to do instead."""


class CpuQuota:
    """A group of the cgroup tree that holds one process to `percent` of one core, all its threads together.

    Args:
        percent: of one core; 100 is a whole one.
        period_us: how often the quota is renewed, in microseconds.
        root: where the cgroup tree is mounted.
        pid: the process; 0 stands for this one.

    Raises:
        SettingError: less than 1 ms a period.
        QuotaError: no root, no controller, or the kernel refused.
    """

    def __init__(
        self, percent: float, *, period_us: int = PERIOD_US, root: Path = Path("/sys/fs/cgroup"), pid: int = 0
    ) -> None:
        quota_us = round(period_us * percent / 100)
        if quota_us < _LEAST_QUOTA_US:
            enough_us = round(_LEAST_QUOTA_US * 100 / percent) if percent > 0 else PERIOD_US
            raise SettingError(
                f"A CPU quota of {percent:g} % of {period_us} us is {quota_us} us a period; the kernel refuses less "
                f"than {_LEAST_QUOTA_US}. Use period_us={enough_us} or more."
            )
        self._pid = pid or os.getpid()
        tree, version = _find_tree(root)
        _remove_left_behind(tree)
        self._home = tree
        self._group = tree / f"{_PREFIX}{os.getpid()}-{self._pid}"
        try:
            if version == 2:
                _write(tree / "cgroup.subtree_control", "+cpu")
            self._group.mkdir(exist_ok=True)
            if version == 1:
                settings = {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{quota_us}"}
            else:
                settings = {"cpu.max": f"{quota_us} {period_us}"}
            for name, value in settings.items():
                _write(self._group / name, value)
                found = (self._group / name).read_text().strip()
                if found != value:
                    raise OSError(0, f"{name} reads '{found}' after '{value}' was written")
            _write(self._group / "cgroup.procs", str(self._pid))
        except OSError as error:
            self.leave()
            raise QuotaError(
                f"The kernel refused a CPU quota in {self._group}: {error.strerror}. Emulate speed by pacing instead: "
                f"[emulate] sample_ms = ... in the cluster file."
            ) from error
        atexit.register(self.leave)

    def leave(self) -> None:
        """Move the process back and remove the group; may be called twice."""
        atexit.unregister(self.leave)
        if not self._group.is_dir():
            return
        with suppress(OSError):  # it may have ended
            _write(self._home / "cgroup.procs", str(self._pid))
        _remove(self._group)

    def __enter__(self) -> "CpuQuota":
        """Be in the group until the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave."""
        self.leave()


@lru_cache(maxsize=1)
def hold_to(percent: float) -> CpuQuota:
    """Put this process under a quota until its end; asked again for the same, it stays where it is."""
    return CpuQuota(percent)


def why_no_quota(root: Path = Path("/sys/fs/cgroup")) -> str:
    """Return why this machine cannot set CPU quotas, or an empty string if it can."""
    try:
        with CpuQuota(100, root=root):
            return ""
    except QuotaError as error:
        return str(error)


def _find_tree(root: Path) -> tuple[Path, int]:
    """The directory under which groups of the `cpu` controller are made, and the tree's version."""
    if os.geteuid() != 0:
        raise QuotaError("CPU quotas need root. Run as root, or emulate speed by pacing: [emulate] sample_ms = ...")
    for name in ("cpu", "cpu,cpuacct"):
        if (root / name / "cpu.cfs_quota_us").exists():
            return root / name, 1
    controllers = root / "cgroup.controllers"
    if controllers.exists():
        if "cpu" in controllers.read_text().split():
            return root, 2
        raise QuotaError(f"{controllers} does not offer the 'cpu' controller. Run outside of this container.")
    raise QuotaError(f"There is no cgroup tree with a 'cpu' controller under {root}. Mount one, or pace instead.")


def _write(file: Path, value: str) -> None:
    # Unbuffered: an error of the kernel belongs to this very call.
    handle = os.open(file, os.O_WRONLY)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)


def _remove(group: Path) -> None:
    """Remove a group; the kernel says "busy" for a moment after its last process has left."""
    for _ in range(50):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)


def _remove_left_behind(tree: Path) -> None:
    """Remove groups whose maker was killed before it could."""
    for group in tree.glob(f"{_PREFIX}*-*"):
        maker = group.name.removeprefix(_PREFIX).split("-")[0]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists():
            with suppress(OSError):
                group.rmdir()
