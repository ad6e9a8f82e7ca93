"""Certificates of an authority of the test's own, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


def authority(folder: Path, name: str) -> Certificate:
    """One that signs others."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    _openssl("req", "-x509", *_NEW_KEY, made.key, "-out", made.cert, "-days", "2", "-subj", f"/CN={name}")
    return made


def signed(by: Certificate, folder: Path, name: str, days: int = 2) -> Certificate:
    """One for 127.0.0.1, signed by an authority; it has expired if `days` is -1."""
    made, request = Certificate(folder / f"{name}.crt", folder / f"{name}.key"), folder / f"{name}.csr"
    _openssl("req", *_NEW_KEY, made.key, "-out", request, "-subj", f"/CN={name}", "-addext", _ADDRESS)
    signing = ("-CA", by.cert, "-CAkey", by.key, "-CAcreateserial", "-copy_extensions", "copy", "-days", str(days))
    _openssl("x509", "-req", "-in", request, "-out", made.cert, *signing)
    return made


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")
_ADDRESS = "subjectAltName=IP:127.0.0.1"


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def replace_file(path: Path, by: Path) -> None:
    """As careful writers do: a new file takes the name."""
    new = path.with_suffix(".new")
    new.write_bytes(by.read_bytes())
    new.chmod(0o600)
    new.rename(path)
