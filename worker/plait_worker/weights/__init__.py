"""Model files, read with limits; nothing in them is ever executed."""

from __future__ import annotations

from pathlib import Path

from plait_worker.weights.errors import ModelFilesError
from plait_worker.weights.folder import Folder
from plait_worker.weights.gguf_file import GgufFile
from plait_worker.weights.interleaved import HalvesSource
from plait_worker.weights.reader import Weights

__all__ = ["Folder", "GgufFile", "HalvesSource", "ModelFilesError", "Weights", "open_checkpoint"]


def open_checkpoint(path: Path) -> Folder | GgufFile:
    """The model files at a path: a folder, or one GGUF file.

    Raises ``ModelFilesError`` where they are missing, broken or not supported.
    """
    if path.is_dir():
        return Folder(path)
    if path.exists():
        return GgufFile(path)
    raise ModelFilesError(f"{path} does not exist: give a model's folder or a GGUF file")
