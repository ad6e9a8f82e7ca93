"""Tiny random models saved by transformers, and what drives one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plait_testing.model_driver import Driver
from plait_testing.random_models import random_model
from plait_worker.models.loader import dummy_model, load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.weights.cache_scales import Fp8Cache
from torch import Tensor

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 13, "head_dim": 8}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "deepseek_v2": (transformers.DeepseekV2Config, DEEPSEEK | {"n_shared_experts": 2, "routed_scaling_factor": 1.5}),
    "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK | {"n_group": 4, "topk_group": 2, "num_mtp_layers": 0}),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Saved:
    """A model of transformers and the folder it was saved to."""

    path: Path
    reference: transformers.PreTrainedModel

    def logprobs(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.reference(torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(-1)


@pytest.fixture
def save_tiny(tmp_path: Path) -> Callable[..., Saved]:
    """Make and save a random model."""

    def save(family: str, seed: int = 0, shard_size: str = "1GB", **changes: Any) -> Saved:
        kind, own = FAMILIES[family]
        model = random_model(kind(**{**TINY, **own, **changes}), seed)
        path = tmp_path / f"{family}-{seed}"
        model.save_pretrained(path, max_shard_size=shard_size)
        return Saved(path, model)

    return save


@pytest.fixture
def load() -> Callable[..., Model]:
    def load(path: Path, dtype: str = "float32", fp8: Fp8Cache | None = None) -> Model:
        return load_model(path, dtype, CPU, Parallel(), fp8=fp8)

    return load


@pytest.fixture
def drive_drawn() -> Callable[[Path], Driver]:
    """Drives a model drawn at random from its configuration alone."""

    def drive_drawn(path: Path) -> Driver:
        return Driver(dummy_model(path, "float32", CPU, Parallel()))

    return drive_drawn


@pytest.fixture
def drive(load: Callable[..., Model]) -> Callable[..., Driver]:
    def drive(
        path: Path,
        page_size: int = 16,
        dtype: str = "float32",
        num_pages: int = 64,
        mla_context_chunk_size: int = 64,
        fp8: Fp8Cache | None = None,
    ) -> Driver:
        return Driver(load(path, dtype, fp8), page_size, num_pages, mla_context_chunk_size)

    return drive
