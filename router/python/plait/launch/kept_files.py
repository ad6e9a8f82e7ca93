"""Small files for processes that this one starts: on disk, or in memory if the disk is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


class KeptFiles:
    """Those in memory end with this process."""

    def __init__(self) -> None:
        self._in_memory: dict[Path, IO[bytes]] = {}

    def write(self, file: Path, content: bytes) -> Path:
        """Where processes of the same user find the content. Raises `OSError` if memory has no place either."""
        try:
            file.write_bytes(content)
        except OSError:
            return self._write_to_memory(file, content)
        return file

    def _write_to_memory(self, file: Path, content: bytes) -> Path:
        if file not in self._in_memory:
            self._in_memory[file] = os.fdopen(os.memfd_create(file.name), "wb", buffering=0)
        kept = self._in_memory[file]
        kept.seek(0)
        kept.truncate()
        kept.write(content)
        return Path(f"/proc/{os.getpid()}/fd/{kept.fileno()}")
