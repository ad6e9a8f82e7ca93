"""Files with secrets that a setting names."""

from __future__ import annotations

import stat
from pathlib import Path

from plait.errors import SettingsError


def read_secret_file(setting: str, path: Path, max_bytes: int, closed_to: int = stat.S_IROTH) -> bytes:
    """Its content. Raises `SettingsError` if it cannot be read, is longer, or is open to others.

    `closed_to` has the permission bits that the file's mode may not have.
    """
    try:
        found = path.stat()
        content = path.read_bytes() if found.st_size <= max_bytes else None
    except OSError as error:
        raise SettingsError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if found.st_mode & closed_to:
        raise SettingsError(f"{setting} {path} is readable by other users; run `chmod 600 {path}`")
    if content is None:
        raise SettingsError(f"{setting} {path} has over {max_bytes} bytes; give a shorter one")
    return content


def check_public_keys_file(setting: str, path: Path) -> None:
    """Raise `SettingsError` if other users may write the list of who is let in."""
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(
            f"{setting} {path} can be written by other users, who could let anybody in; run `chmod 644 {path}`"
        )
