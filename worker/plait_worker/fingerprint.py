"""Whether the ranks of a replica read the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from plait_worker.errors import ModelFilesError
from plait_worker.parallel import Parallel

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64
_ENDINGS = (".json", ".safetensors", ".gguf")


def check_same_files(path: Path, parallel: Parallel) -> None:
    """Raise ``ModelFilesError`` on every rank if the files at ``path`` of one rank differ from rank 0's.

    It compares names, sizes and 64 samples of each file: reading everything would take as long as loading.
    """
    if parallel.world == 1:
        return
    own = torch.frombuffer(bytearray(fingerprint(path)), dtype=torch.uint8)
    of_all = parallel.all_gather(own).view(parallel.world, -1)
    others = [rank for rank in range(parallel.world) if not torch.equal(of_all[rank], of_all[0])]
    if others:
        named = ", ".join(map(str, others))
        raise ModelFilesError(
            f"the model files of rank {named} differ from those of rank 0 ({path} on rank {parallel.rank}): "
            "copy the same files to every rank"
        )


def fingerprint(path: Path) -> bytes:
    """32 bytes that differ if the names, sizes or samples of model files do."""
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size}\n".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.digest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in _ENDINGS and file.is_file())
    return [path] if path.is_file() else []


def _samples(file: Path) -> Iterator[bytes]:
    """At even distances from the first bytes to the last; all of a small file."""
    size = file.stat().st_size
    stride = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
    with file.open("rb") as opened:
        for begin in range(0, size, stride):
            opened.seek(begin)
            yield opened.read(_SAMPLE_BYTES)
