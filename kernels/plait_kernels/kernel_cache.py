"""Machine code of kernels, kept in a folder, so that a later start compiles nothing.

A GPU's driver loads it as it is. So the folder must be this user's, and nobody else may write there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)

MAX_FILES = 256
"""Those that were used last stay. A model has some forty, of 10 to 100 KB."""
_SUFFIX = ".cubin"
"""Files without it are not ours, and stay."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelCache:
    """Any thread may ask it, and any process may share its folder. Nothing is kept until it knows one."""

    def __init__(self) -> None:
        """Without a folder."""
        self._path: Path | None = None
        self._folder: int | None = None
        self._opening = threading.Lock()

    def keep_in(self, folder: Path | None) -> None:
        """Use this folder from now on, or none. It is made once there is something to keep."""
        with self._opening:
            self._path = folder
            if self._folder is not None:
                os.close(self._folder)
                self._folder = None

    def get(self, key: str) -> bytes | None:
        """The code of this key; None if there is none, or a broken file."""
        folder = self._opened()
        if folder is None:
            return None
        try:
            kept = _read(key + _SUFFIX, folder)
        except OSError as error:
            _log.debug("no compiled kernel: %s", error)
            return None
        with contextlib.suppress(OSError):  # of a folder that can only be read
            os.utime(key + _SUFFIX, dir_fd=folder, follow_symlinks=False)
        digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        return code if hashlib.sha256(code).digest() == digest else None

    def put(self, key: str, code: bytes) -> None:
        """Keep it, unless the folder cannot be written."""
        folder = self._opened()
        if folder is None:
            return
        try:
            _write(key + _SUFFIX, hashlib.sha256(code).digest() + code, folder)
            _prune(folder)
        except OSError as error:
            _log.debug("a compiled kernel is not kept: %s", error)

    def _opened(self) -> int | None:
        with self._opening:
            if self._path is not None and self._folder is None:
                try:
                    self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._folder = _open_own(self._path)
                except OSError as error:
                    _log.debug("compiled kernels are not kept in %s: %s", self._path, error)
                    self._path = None
            return self._folder


def key_of(parts: Iterable[bytes]) -> str:
    """Of all that the code follows from."""
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()


def _open_own(folder: Path) -> int:
    """A descriptor of the folder, which others cannot put another in place of."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    about = os.fstat(opened)
    if about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return opened
    os.close(opened)
    raise PermissionError("it is another user's, or others may write there")


def _read(name: str, folder: int) -> bytes:
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        with open(opened, "rb") as file:
            return file.read()
    os.close(opened)
    raise OSError(f"{name} is no regular file")


def _write(name: str, content: bytes, folder: int) -> None:
    """Whole, or not at all."""
    new = f".{os.getpid()}.{threading.get_ident()}.{name}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(new, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        raise


def _prune(folder: int) -> None:
    """What a killed process left half written goes too, once it is among the oldest."""
    names = (name for name in os.listdir(folder) if name.endswith(_SUFFIX))
    by_time = sorted(((_used_at(name, folder), name) for name in names), reverse=True)
    for _, name in by_time[MAX_FILES:]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _used_at(name: str, folder: int) -> float:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    except FileNotFoundError:  # another process was faster
        return 0.0
