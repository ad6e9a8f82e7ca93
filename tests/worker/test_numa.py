"""A rank stays on its GPU's NUMA node if the machine has several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plait_worker import numa

ADDRESS = "0000:8d:00.0"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """A system in a folder whose second node, cores 4 to 7 and 12 to 15, has the device; what the process keeps to."""
    kept: list[set[int]] = []
    monkeypatch.setattr(numa, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(14)))
    monkeypatch.setattr(numa, "_OWN_THREADS", tmp_path / "task")
    (tmp_path / "task" / "17").mkdir(parents=True)
    (tmp_path / "task" / "18").mkdir()
    monkeypatch.setattr(os, "sched_setaffinity", lambda _thread, cores: kept.append(set(cores)))
    write(tmp_path / "bus/pci/devices" / ADDRESS / "numa_node", "1")
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3,8-11")
    write(tmp_path / "devices/system/node/node1/cpulist", "4-7,12-15")
    return kept


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_every_thread_keeps_to_those_cores_of_the_devices_node_that_it_may_use(kept: list[set[int]]) -> None:
    assert numa.bind_to_node(ADDRESS) == "node 1, 6 cores"
    assert kept == [{4, 5, 6, 7, 12, 13}] * 2


@pytest.mark.parametrize("node", ["-1", "7"])
def test_a_device_of_no_node_or_of_one_without_cores_changes_nothing(
    node: str, kept: list[set[int]], tmp_path: Path
) -> None:
    write(tmp_path / "bus/pci/devices" / ADDRESS / "numa_node", node)
    write(tmp_path / "devices/system/node/node7/cpulist", "")
    assert numa.bind_to_node(ADDRESS) is None
    assert kept == []


def test_a_device_that_the_system_does_not_show_changes_nothing(kept: list[set[int]]) -> None:
    assert numa.bind_to_node("0000:01:00.0") is None
    assert kept == []


def test_cores_that_the_process_may_not_use_stay_out(kept: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    assert numa.bind_to_node(ADDRESS) is None
    assert kept == []


def test_a_machine_of_one_node_is_left_as_it_is(kept: list[set[int]], tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0/cpulist").unlink()
    (tmp_path / "devices/system/node/node0").rmdir()
    assert numa.bind_to_node(ADDRESS) is None
    assert kept == []
