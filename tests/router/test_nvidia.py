"""The memory of the GPUs that this process may use, from what nvidia-smi lists."""

from pathlib import Path

import pytest
from plait.nvidia import gpu_memory_bytes, is_hopper, pairs_without_peer_access, read_peer_table, smallest_memory_bytes

LARGE, SMALL, SLICED = "GPU-1a2b, 143771, Disabled", "GPU-1c3d, 24564, [N/A]", "GPU-7e8f, 143771, Enabled"


@pytest.mark.parametrize(
    ("visible", "mebibytes"),
    [
        (None, 24_564),
        ("0", 143_771),
        ("1", 24_564),
        (" 0 , 1", 24_564),
        ("GPU-1a2b", 143_771),
        ("GPU-1c", 24_564),
        ("0,-1,1", 143_771),
        ("0,9,1", 143_771),
        ("GPU-1", None),
        ("MIG-6d0c", None),
        ("", None),
        ("-1", None),
    ],
)
def test_visible_gpus_alone_count(visible: str | None, mebibytes: int | None) -> None:
    found = smallest_memory_bytes(f"{LARGE}\n{SMALL}\n", visible)
    assert found == (None if mebibytes is None else mebibytes << 20)


def test_a_sliced_gpu_has_no_known_memory_unless_it_is_hidden() -> None:
    listed = f"{LARGE}\n{SLICED}\n"
    assert smallest_memory_bytes(listed, None) is None
    assert smallest_memory_bytes(listed, "1") is None
    assert smallest_memory_bytes(listed, "0") == 143_771 << 20


@pytest.mark.parametrize(
    ("script", "mebibytes"),
    [(f"echo '{LARGE}'; echo '{SMALL}'", 143_771), ("echo No devices were found", None), ("exit 9", None)],
)
def test_the_command_is_asked(
    script: str, mebibytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_bytes("GPU-1a2b") == (None if mebibytes is None else mebibytes << 20)


@pytest.mark.parametrize(
    ("script", "is_found"),
    [
        ("echo GPU-1a2b, 9.0; echo GPU-3c4d, 10.0", True),
        ("echo GPU-1a2b, 10.0", False),
        ("echo GPU-3c4d, 9.0", False),
        ("echo No devices were found", False),
        ("exit 9", False),
    ],
)
def test_hopper_is_told_by_the_compute_capability(
    script: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_hopper("GPU-1a2b") is is_found


PEERS = """ \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tNS\t
 GPU1\tOK\tX\tOK\t
 GPU2\tNS\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  NS   = Not supported
"""


@pytest.mark.parametrize(("gpus", "pairs"), [([0, 1, 2], [(0, 2)]), ([0, 1], []), ([2], []), ([0, 9], [])])
def test_gpus_that_do_not_reach_each_other_are_read_from_the_matrix(
    gpus: list[int], pairs: list[tuple[int, int]]
) -> None:
    assert list(read_peer_table(PEERS, gpus)) == pairs
    assert list(read_peer_table("\x1b[4mGPU0\n no table", gpus)) == []


def test_without_the_command_no_pair_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pairs_without_peer_access([0, 1]) == []
