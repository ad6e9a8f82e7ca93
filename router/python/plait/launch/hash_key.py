"""The secret behind the hashes of cached pages and the salts of tenants: random, or one that replicas share."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from plait.errors import SettingsError
from plait.secret_file import read_secret_file

MIN_CHARACTERS = 32
MAX_BYTES = 4096


class CacheSecrets(NamedTuple):
    """Neither can be computed from the other."""

    hash_key: str
    """Key of the pages' hashes, 32 hexadecimal digits."""
    salt_key: bytes
    """Key of the numbers that stand for clients and their `cache_salt`."""


def cache_secrets(path: str | None) -> CacheSecrets:
    """The secrets that follow from a file's, or random ones. Raises `SettingsError` if the file cannot be used."""
    secret = os.urandom(32) if path is None else _read(Path(path))
    return CacheSecrets(_derive(secret, b"page hashes", 16).hex(), _derive(secret, b"client salts", 32))


def _derive(secret: bytes, use: bytes, num_bytes: int) -> bytes:
    digest = hashlib.blake2b(secret, digest_size=num_bytes, person=use)
    return digest.digest()


def _read(path: Path) -> bytes:
    secret = read_secret_file("--kv-hash-key-file", path, MAX_BYTES, stat.S_IRGRP | stat.S_IROTH).strip()
    if len(secret) < MIN_CHARACTERS:
        raise SettingsError(
            f"--kv-hash-key-file {path} holds {len(secret)} characters; it needs {MIN_CHARACTERS} to {MAX_BYTES}, "
            "say from `openssl rand -hex 32`"
        )
    return secret
