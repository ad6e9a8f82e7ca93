"""Ranks of several engines find each other, and nobody whom an earlier group left behind."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from plait_proto import ExitCode
from plait_worker import meeting
from plait_worker.errors import WorkerError
from plait_worker.meeting import open_store


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        return ended.pid


def leave_behind(directory: Path, pid: int) -> None:
    """What an earlier group's rank 0 wrote, with a key that must not be read."""
    (directory / "ranks").write_bytes(msgspec.json.encode({"file": "ranks-old", "pid": pid}))
    dist.FileStore(str(directory / "ranks-old"), 2).set("greeting", "stale")


def meet(directory: Path) -> str:
    """What rank 1 reads of rank 0."""

    def as_rank(rank: int) -> str:
        store = open_store(directory, directory / "run", rank, 2)
        if rank == 0:
            store.set("greeting", "fresh")
        store.wait(["greeting"], timedelta(seconds=30))
        return store.get("greeting").decode()

    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(as_rank, 1)
        first = pool.submit(as_rank, 0)
        first.result()
        return second.result()


def test_ranks_meet_in_the_groups_directory(tmp_path: Path) -> None:
    assert meet(tmp_path) == "fresh"


def test_what_a_dead_group_left_is_not_met(tmp_path: Path) -> None:
    leave_behind(tmp_path, dead_process())
    assert meet(tmp_path) == "fresh"
    assert not (tmp_path / "ranks-old").exists()


def test_a_first_rank_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_JOIN_SECONDS", 0.0)
    leave_behind(tmp_path, dead_process())
    with pytest.raises(WorkerError, match="rank 0 of the group did not come") as raised:
        open_store(tmp_path, tmp_path, 1, 2)
    assert raised.value.code == ExitCode.RANK_LOST
