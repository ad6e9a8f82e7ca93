"""Fingerprints of the schema and of a configuration: peers must have the same."""

from __future__ import annotations

import hashlib
import importlib.resources

SCHEMA = importlib.resources.files("plait_proto").joinpath("schema.txt").read_bytes()
"""Every message with its fields, as text."""


def config_fingerprint(config: bytes) -> bytes:
    """The first 16 bytes of the SHA-256 of a worker's configuration file."""
    return _fingerprint(config)


def _fingerprint(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:16]


SCHEMA_FINGERPRINT = _fingerprint(SCHEMA)
"""The same of ``schema.txt``."""
