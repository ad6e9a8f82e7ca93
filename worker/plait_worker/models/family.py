"""The one registration of a model family, which its model file makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait_proto import Family

from plait_worker.models.model import Model
from plait_worker.weights.gguf_config import GgufSpec
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from plait_worker.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """How a family's files are read, and how it computes."""

    family: Family
    """Names, kinds of layers and formats, which the engine and the command line read too."""
    config: ConfigSpec
    """How its ``config.json`` is read."""
    read_model: Callable[..., Model[Any]]
    """The model of a configuration, weights, a ``Parallel`` and the attention specs of its layers."""
    gguf: GgufSpec | None = None
    """How its GGUF files are read; None if they are not supported."""
    open_folder: Callable[[Path], TensorSource] = SafetensorsFolder
    """Its tensors in a folder, by the names that the model reads."""

    @property
    def architecture(self) -> str:
        """Its first name in ``config.json``."""
        return self.family.architectures[0]
