"""The run directory of a server: private, with a short path. It is removed at exit, or at the next start."""

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
"""The path of an ipc socket has at most 107 bytes; the rest is for file names."""
PREFIX = "plait-"
LOCK = "server.lock"
"""Locked while the server runs, so that directories of killed servers can be recognised."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Written into the lock file: locks of other machines cannot be tested from here."""


@contextmanager
def run_directory() -> Iterator[Path]:
    """A new directory of mode 0700, removed at the end. Directories of killed servers are removed first."""
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
    """The held lock file. It appears under its name only once locked, and is held until the process ends."""
    new = path / f"{LOCK}.new"
    file = new.open("wb", buffering=0)
    # Some file systems have no locks: then only the server itself removes the directory.
    with suppress(OSError):
        file.write(BOOT_ID.read_bytes())
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(path / LOCK)
    return file


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user's killed servers. Unreadable ones stay."""
    for path in parent.glob(f"{PREFIX}????????"):
        with suppress(OSError):
            about = path.lstat()
            is_ours = about.st_uid == os.getuid() and about.st_mode & 0o777 == 0o700
            if is_ours and _is_abandoned(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(lock: Path) -> bool:
    """Whether its server was killed on this machine; raises `OSError` if the lock cannot be read."""
    if not lock.is_file() or lock.read_bytes() != BOOT_ID.read_bytes():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
