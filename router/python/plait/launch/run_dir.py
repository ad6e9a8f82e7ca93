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


@contextmanager
def run_directory() -> Iterator[Path]:
    """A fresh directory of mode 0700, removed with all that is in it; those of killed servers are removed before."""
    parent = tempfile.gettempdir()
    if len(parent.encode()) > MAX_DIR_BYTES - len(PREFIX + "12345678"):
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
    file = new.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    new.rename(path / LOCK)
    return file


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user's servers that were killed; what cannot be looked at stays."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not _is_held(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    """Raises `OSError` where there is no such lock."""
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
