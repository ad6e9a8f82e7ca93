"""Memory and CPU limits of control groups, version 1 and 2, wherever they are mounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plait_worker import machine

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores whose control groups lie in a folder."""
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in files.items():
        (folder / name.replace("__", ".")).write_text(f"{number}\n")


def test_without_a_quota_the_affinity_counts(groups: Path) -> None:
    write(groups, own="3:cpu,cpuacct:/a\n0::/a")
    write(groups / "a", cpu__max="max 100000")
    write(groups / "cpu" / "a", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert machine.num_usable_cores() == 8


@pytest.mark.parametrize("around", ["", "a", "a/b"])
def test_a_cgroup_v2_quota_counts_at_every_level(groups: Path, around: str) -> None:
    write(groups, own="0::/a/b")
    write(groups / around, cpu__max="350000 100000")
    assert machine.num_usable_cores() == 3


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("around", ["", "a", "a/b"])
def test_a_quota_of_the_first_version_counts_too(groups: Path, controllers: str, mounted: str, around: str) -> None:
    write(groups, own=f"9:name=systemd:/\n4:memory:/c\n2:cpuset:/\n1:{controllers}:/a/b\n0::/")
    write(groups / mounted / around, cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    assert machine.num_usable_cores() == 2


def test_less_than_a_core_is_one(groups: Path) -> None:
    write(groups, own="1:cpu:/")
    write(groups / "cpu", cpu__cfs_quota_us=20_000, cpu__cfs_period_us=100_000)
    assert machine.num_usable_cores() == 1


def test_memory_is_what_the_tightest_group_leaves(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_available_bytes", lambda: 100 * GIB)
    write(groups, own="4:hugetlb,memory:/a\n0::/a")
    assert machine.free_memory_bytes() == 100 * GIB
    write(groups / "a", memory__max=9 * GIB, memory__current=GIB, memory__stat=f"inactive_file {GIB // 2}")
    assert machine.free_memory_bytes() == 8 * GIB + GIB // 2
    write(groups / "memory" / "a", memory__limit_in_bytes=5 * GIB, memory__usage_in_bytes=GIB)
    assert machine.free_memory_bytes() == 4 * GIB
