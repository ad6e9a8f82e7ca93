"""Files that are read again when they change, while the server runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from plait.errors import SettingsError
from plait.log import log

POLL_SECONDS = 1.0
V = TypeVar("V")


class _Stamp(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int
    """A change of mode counts too."""


class LiveFiles(ABC, Generic[V]):
    """What is read from some files. A new state of them that cannot be used is refused, and the value before stays."""

    def __init__(self, name: str, paths: Iterable[Path]) -> None:
        """Read them; raises `SettingsError` if they cannot be used. `name` begins the log's lines."""
        self._name = name
        self._paths = tuple(paths)
        self._read = self._seen = self._stamps()
        self.value = self.read()
        self.num_loaded = self.num_refused = 0
        self.problem: str | None = None
        """What is wrong with the files as they are now. They are read at each poll: reading itself may have failed."""

    @abstractmethod
    def read(self) -> V:
        """The value in the files; raises `SettingsError`."""

    @abstractmethod
    def shown(self) -> str:
        """The value in the log's words: `3 from FILE`."""

    @abstractmethod
    def shown_kept(self) -> str:
        """The value that stays, in the log's words: `the 3`."""

    def poll(self) -> None:
        """Read the files if they have changed, and have not since the last poll: their writer is through."""
        stamps = self._stamps()
        settled, self._seen = stamps == self._seen, stamps
        if settled and (stamps != self._read or self.problem is not None):
            self._read = stamps
            self._reload()

    def _reload(self) -> None:
        try:
            self.value = self.read()
        except SettingsError as error:
            if str(error) != self.problem:
                self.num_refused += 1
                self._log(f"kept {self.shown_kept()} read before, for {error}", "WARNING")
            self.problem = str(error)
            return
        self.num_loaded += 1
        self.problem = None
        self._log(f"{self.shown()}, which has changed")

    async def watch(self) -> None:
        """Poll until cancelled. The files' disk may be slow: a thread reads them."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.poll)

    def _log(self, what: str, level: str = "INFO") -> None:
        line = f"{self._name}: {what}"
        log("http", line, level, text=line)

    def _stamps(self) -> tuple[_Stamp | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp | None:
    """None if it cannot be looked at: the next read says why."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
