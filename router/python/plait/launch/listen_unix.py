"""The listening Unix socket of `--uds`."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from plait.errors import SettingsError
from plait.launch.listen import BACKLOG

MAX_PATH_BYTES = 107
"""Linux's limit, without the zero at the end."""
_MODE = 0o660


@contextlib.contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """A socket at `path` that listens and goes with the block; its user and group may connect.

    Takes the place of one that nobody listens on. Raises `SettingsError` if the path cannot be used.
    """
    path = path.absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SettingsError(
            f"--uds {path} has over {MAX_PATH_BYTES} bytes, which is Linux's limit; give a shorter path"
        )
    _remove_left_over(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _bind(listener, path)
        except OSError as error:
            raise SettingsError(f"--uds {path} cannot be listened on: {error.strerror}; give another path") from error
        made = path.stat().st_ino
        try:
            yield listener
        finally:
            _unlink_own(path, made)


def _bind(listener: socket.socket, path: Path) -> None:
    """Closed to others from its first moment."""
    before = os.umask(0o777 & ~_MODE)
    try:
        listener.bind(os.fsencode(path))
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    listener.setblocking(False)


def _remove_left_over(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return  # nothing is there, or `bind` says what is wrong
    if not is_socket:
        raise SettingsError(f"--uds {path} exists and is no socket; give another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fsencode(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise SettingsError(f"--uds {path} cannot be replaced: {error.strerror}; give another path") from error
    raise SettingsError(f"--uds {path} is in use: a process listens there; end it, or give another path")


def _unlink_own(path: Path, inode: int) -> None:
    """A newer server may have taken the path."""
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()
