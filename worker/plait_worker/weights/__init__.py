"""Model files, read with limits; nothing in them is ever executed."""

from __future__ import annotations

from pathlib import Path

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig
from plait_worker.weights.dummy import DummyWeights
from plait_worker.weights.folder import Folder, read_json
from plait_worker.weights.gguf_file import GgufFile
from plait_worker.weights.interleaved import rows_in_halves
from plait_worker.weights.json_config import read_config
from plait_worker.weights.progress import LoadingProgress
from plait_worker.weights.reader import Held, Weights

__all__ = [
    "DummyWeights",
    "Folder",
    "GgufFile",
    "Held",
    "LoadingProgress",
    "ModelFilesError",
    "Weights",
    "open_checkpoint",
    "open_config",
    "rows_in_halves",
]


def open_checkpoint(path: Path) -> Folder | GgufFile:
    """The model files at a path: a folder, or one GGUF file.

    Raises ``ModelFilesError`` where they are missing, broken or not supported.
    """
    if path.is_dir():
        return Folder(path)
    if path.exists():
        return GgufFile(path)
    raise ModelFilesError(f"{path} does not exist: give a model's folder or a GGUF file")


def open_config(path: Path) -> ModelConfig:
    """The configuration in a folder, whether or not it holds weights; raises ``ModelFilesError``."""
    return read_config(read_json(path / "config.json"))
