"""Model families: one file each, and the door that loads one from its files.

Shapes: T tokens of a step, S rows that sample, D the hidden size, V the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from plait_worker.attention import AttentionShape, StepAttention
from plait_worker.cache import CacheSpec, KVCache
from plait_worker.model_config import ModelConfig
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows


class Model(Protocol):
    """A loaded model on one rank."""

    @property
    def config(self) -> ModelConfig:
        """The whole model's sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and cache."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        ...

    @property
    def cache_spec(self) -> CacheSpec:
        """What this rank keeps of each token."""
        ...

    @property
    def attention_shape(self) -> AttentionShape:
        """What this rank's attention backend is made for."""
        ...

    def forward(self, rows: Rows, cache: KVCache, attention: StepAttention) -> Tensor:
        """Hidden states after the final norm, ``hidden_TD``; writes the step's keys and values into the cache."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 ``[S, V]`` over the whole vocabulary; call it with the rows that sample only, at least one."""
        ...


def load_model(path: Path, dtype: str, device: torch.device, parallel: Parallel) -> Model:
    """The model in a Hugging Face folder or a GGUF file; ``dtype`` is auto, float32, bfloat16 or float16.

    Raises ``ModelFilesError`` where the files are missing, broken or not supported.
    """
    raise NotImplementedError
