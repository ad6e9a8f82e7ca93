"""The directory where engine and workers meet: private, short, and gone at exit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_DIR_BYTES = 80
"""An ipc socket's name ends at 107 bytes; the rest is for the file names within."""


@contextmanager
def run_directory() -> Iterator[Path]:
    """A fresh directory of mode 0700, removed with all that is in it."""
    parent = tempfile.gettempdir()
    if len(parent.encode()) > MAX_DIR_BYTES - len("/plait-12345678"):
        parent = "/tmp"
    path = Path(tempfile.mkdtemp(prefix="plait-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
