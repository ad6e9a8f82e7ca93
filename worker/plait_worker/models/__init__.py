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
from plait_worker.models import llama, qwen3, qwen3_moe
from plait_worker.models.decoder import BlockReader, Decoder
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.weights import Weights, open_checkpoint

BLOCKS: dict[str, BlockReader] = {
    "LlamaForCausalLM": llama.read_block,
    "Qwen3ForCausalLM": qwen3.read_block,
    "Qwen3MoeForCausalLM": qwen3_moe.read_block,
}
"""How each architecture's blocks are read."""
NOT_LOADED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old files hold and that follow from the configuration."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    checkpoint = open_checkpoint(path)
    weights = Weights(checkpoint, choose_dtype(dtype, device), device)
    with torch.inference_mode():
        model = Decoder(checkpoint.config, weights, parallel, BLOCKS[checkpoint.config.architecture])
    unused_head = ("lm_head.weight",) if checkpoint.config.tie_embeddings else ()
    weights.refuse_leftovers(NOT_LOADED + unused_head)
    return model


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type that a setting means; auto is bfloat16 where the device multiplies it natively, else float32.

    Raises ``ValueError`` for another name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} must be auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32
