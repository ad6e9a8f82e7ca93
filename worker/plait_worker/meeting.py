"""Where ranks find each other: a file in the run directory, or in the directory of a group of engines on one host."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import msgspec
import torch.distributed as dist
from plait_proto import UNDECODABLE, ExitCode

from plait_worker.errors import WorkerError

_POINTER = "ranks"
_JOIN_SECONDS = 1800.0
"""For the group's first rank, which loads after its own engine has started; as engines wait for each other."""
_POLL_SECONDS = 0.05


class _Meeting(msgspec.Struct, frozen=True):
    """What rank 0 writes for the others."""

    file: str
    """Of the store, in the same directory."""
    pid: int
    """Of rank 0."""


def open_store(directory: Path | None, run_dir: Path, rank: int, world: int) -> dist.Store:
    """The store of all ranks: in ``run_dir`` if one engine has them all, else in the group's ``directory``.

    A group's directory outlives its ranks, and what an earlier group left there must not be met: rank 0 makes a new
    file and names it, and the others wait for a name that a living process gave. Raises ``WorkerError`` of code
    RANK_LOST if none comes.
    """
    if directory is None:
        return dist.FileStore(str(run_dir / _POINTER), world)
    file = _name_new_file(directory) if rank == 0 else _await_file(directory, time.monotonic() + _JOIN_SECONDS)
    return dist.FileStore(str(directory / file), world)


def _name_new_file(directory: Path) -> str:
    for stale in directory.glob(f"{_POINTER}-*"):
        stale.unlink(missing_ok=True)
    meeting = _Meeting(f"{_POINTER}-{uuid.uuid4().hex}", os.getpid())
    written = directory / f"{meeting.file}.new"
    written.write_bytes(msgspec.json.encode(meeting))
    written.replace(directory / _POINTER)
    return meeting.file


def _await_file(directory: Path, deadline: float) -> str:
    while (meeting := _read(directory / _POINTER)) is None or not _is_alive(meeting.pid):
        if time.monotonic() > deadline:
            raise WorkerError(
                ExitCode.RANK_LOST,
                f"rank 0 of the group did not come to {directory} within {_JOIN_SECONDS:.0f} s: see whether engine 0 "
                "runs on this host and uses this directory",
            )
        time.sleep(_POLL_SECONDS)
    return meeting.file


def _read(pointer: Path) -> _Meeting | None:
    try:
        return msgspec.json.decode(pointer.read_bytes(), type=_Meeting)
    except (FileNotFoundError, *UNDECODABLE):
        return None


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
