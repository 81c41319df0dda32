import os
import subprocess
import sys

import pytest

from ragtag.core.errors import SettingError
from ragtag.emulate import quota
from ragtag.emulate.quota import CpuQuota, QuotaError, why_no_quota

BUSY = """
import time
input()
before_s, end_s = time.process_time(), time.perf_counter() + 1.0
while time.perf_counter() < end_s:
    pass
print(time.process_time() - before_s)
"""


@pytest.fixture
def as_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def fake_tree(root, version):
    """Plain files stand in for the kernel's; it makes a group's files itself, which a test does up front."""
    tree = root / "cpu" if version == 1 else root
    group = tree / f"ragtag-quota-{os.getpid()}-123"
    group.mkdir(parents=True)
    (tree / "cgroup.procs").write_text("")
    (group / "cgroup.procs").write_text("")
    if version == 1:
        (tree / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_quota_us").write_text("")
        (group / "cpu.cfs_period_us").write_text("")
    else:
        (tree / "cgroup.controllers").write_text("cpu memory\n")
        (tree / "cgroup.subtree_control").write_text("")
        (group / "cpu.max").write_text("")
    return tree, group


def test_version_1_gets_period_quota_and_process(tmp_path, as_root, monkeypatch):
    monkeypatch.setattr(quota, "_remove", lambda group: None)
    tree, group = fake_tree(tmp_path, 1)
    held = CpuQuota(15, root=tmp_path, pid=123)
    assert (group / "cpu.cfs_period_us").read_text() == "100000"
    assert (group / "cpu.cfs_quota_us").read_text() == "15000"
    assert (group / "cgroup.procs").read_text() == "123"
    held.leave()
    assert (tree / "cgroup.procs").read_text() == "123"


def test_version_2_gets_one_line(tmp_path, as_root, monkeypatch):
    monkeypatch.setattr(quota, "_remove", lambda group: None)
    tree, group = fake_tree(tmp_path, 2)
    with CpuQuota(60, root=tmp_path, pid=123):
        assert (tree / "cgroup.subtree_control").read_text() == "+cpu"
        assert (group / "cpu.max").read_text() == "60000 100000"
        assert (group / "cgroup.procs").read_text() == "123"
    assert (tree / "cgroup.procs").read_text() == "123"


def test_less_than_a_millisecond_is_refused_before_the_kernel_does(tmp_path):
    with pytest.raises(SettingError, match=r"750 us a period.*period_us=6667 or more"):
        CpuQuota(15, period_us=5000, root=tmp_path)
    with pytest.raises(SettingError, match="0 us a period"):
        CpuQuota(0, root=tmp_path)


def test_what_is_missing_is_said(tmp_path, as_root, monkeypatch):
    assert "no cgroup tree" in why_no_quota(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert "does not offer the 'cpu' controller" in why_no_quota(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in why_no_quota(tmp_path)


def test_a_kernel_that_refuses_or_forgets_is_named_and_cleaned_up_after(tmp_path, as_root):
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    with pytest.raises(QuotaError, match=r"refused a CPU quota.*sample_ms"):
        CpuQuota(15, root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.controllers"]


def test_groups_of_dead_processes_are_removed(tmp_path, as_root):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    tree, _ = fake_tree(tmp_path, 1)
    (tree / f"ragtag-quota-{dead.pid}-1").mkdir()
    (tree / f"ragtag-quota-{os.getpid()}-1").mkdir()
    quota._remove_left_behind(tree)
    assert not (tree / f"ragtag-quota-{dead.pid}-1").exists()
    assert (tree / f"ragtag-quota-{os.getpid()}-1").exists()


def test_a_real_process_is_slowed_and_let_go():
    reason = why_no_quota()
    if reason:
        pytest.skip(reason)
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with CpuQuota(10, pid=process.pid):
        output, _ = process.communicate("\n", timeout=60)
    assert float(output) < 0.5  # 0.1 s, or a little more for the period it began in
    assert why_no_quota() == ""
