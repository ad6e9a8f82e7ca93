"""The directory where engine and workers meet: private, short, and gone at exit, or at the next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

MAX_DIR_BYTES = 80
"""An ipc socket's name ends at 107 bytes; the rest is for the file names within."""
PREFIX = "plait-"
LOCK = "server.lock"
"""Locked in a directory whose server lives, so that what a killed one left can be told from it."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Written into the lock: one that another machine holds, or held, cannot be told from one that nobody holds."""


@contextmanager
def run_directory() -> Iterator[Path]:
    """A fresh directory of mode 0700, removed with all that is in it; those of killed servers are removed before."""
    parent = tempfile.gettempdir()
    if len(parent.encode()) > MAX_DIR_BYTES - len(f"/{PREFIX}12345678"):
        parent = "/tmp"
    _remove_abandoned(Path(parent))
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with _locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _locked(path: Path) -> IO[bytes]:
    """Its lock, held until it is closed or the process ends; it never lies there unheld while the server lives."""
    new = path / f"{LOCK}.new"
    file = new.open("wb", buffering=0)
    # Not every file system has locks: without one, nobody but the server itself removes the directory.
    with suppress(OSError):
        file.write(BOOT_ID.read_bytes())
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(path / LOCK)
    return file


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user's servers that were killed; what cannot be looked at stays."""
    for path in parent.glob(f"{PREFIX}????????"):
        with suppress(OSError):
            about = path.lstat()
            is_ours = about.st_uid == os.getuid() and about.st_mode & 0o777 == 0o700
            if is_ours and _is_abandoned(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(lock: Path) -> bool:
    """Whether its server was killed on this machine; raises `OSError` where it cannot be read."""
    if not lock.is_file() or lock.read_bytes() != BOOT_ID.read_bytes():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
