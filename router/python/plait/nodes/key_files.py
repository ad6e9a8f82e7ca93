"""Key files of a server's nodes: `plait keys new` writes them, launchers and engines read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from plait.errors import SettingsError
from plait.secret_file import check_public_keys_file, read_secret_file

PUBLIC_KEYS = "public.keys"
KEY_CHARACTERS = 40
"""Of a CURVE key in Z85."""
MAX_BYTES = 1 << 14


class NodeKeys(NamedTuple):
    """CURVE keys as one node holds them, in Z85."""

    secret: bytes
    """This node's."""
    public: tuple[bytes, ...]
    """Of all nodes; node 0's first."""


def secret_key_file(folder: Path, node: int) -> Path:
    """Where the secret key of `node` is."""
    return folder / f"node-{node}.key"


def write_new_keys(folder: Path, num_nodes: int) -> list[Path]:
    """Make a key pair for each node; the files written. Raises `SettingsError` if one of them exists."""
    files = [folder / PUBLIC_KEYS, *(secret_key_file(folder, node) for node in range(num_nodes))]
    if there := next((file for file in files if file.exists()), None):
        raise SettingsError(f"{there} exists; nodes that run may use it: give another folder, or remove it")
    pairs = [zmq.curve_keypair() for _ in range(num_nodes)]
    contents = [b"".join(public + b"\n" for public, _ in pairs), *(secret + b"\n" for _, secret in pairs)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, content, mode in zip(files, contents, [0o644] + [0o600] * num_nodes, strict=True):
            _write(file, content, mode)
    except OSError as error:
        raise SettingsError(f"keys cannot be written to {folder}: {error.strerror}; give another folder") from error
    return files


def _write(file: Path, content: bytes, mode: int) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(content)


def read_keys(folder: Path, node: int, num_nodes: int) -> NodeKeys:
    """The keys of `node`. Raises `SettingsError` if files are missing, open to others, or do not fit together."""
    own = secret_key_file(folder, node)
    secret = _words(read_secret_file("--keys", own, MAX_BYTES, stat.S_IRWXG | stat.S_IRWXO))
    public = _words(read_secret_file("--keys", folder / PUBLIC_KEYS, MAX_BYTES, 0))
    check_public_keys_file("--keys", folder / PUBLIC_KEYS)
    if len(secret) != 1 or len(public) != num_nodes or any(len(key) != KEY_CHARACTERS for key in (*secret, *public)):
        raise SettingsError(
            f"--keys {folder} has {len(public)} public keys and {len(secret)} words in {own.name}; it needs "
            f"{num_nodes} and 1, of {KEY_CHARACTERS} characters: `plait keys new DIR --nodes {num_nodes}` makes them"
        )
    if _public_of(secret[0]) != public[node]:
        raise SettingsError(
            f"{own} is not the key in line {node + 1} of {folder / PUBLIC_KEYS}; copy both from one `plait keys new`"
        )
    return NodeKeys(secret[0], tuple(public))


def _words(content: bytes) -> list[bytes]:
    return content.split()


def _public_of(secret: bytes) -> bytes:
    try:
        z85.decode(secret)
        return zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError, KeyError):
        return b""
