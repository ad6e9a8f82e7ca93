"""Random DeepSeek models at the kernels' own sizes, in bfloat16, teacher-forced against float32.

A backend may differ from float32 hardly more than the torch backend does: both round the same values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gpu_driver import GPU, NUM_TOKENS, PAGE_SIZE, divergence, logprobs
from plait_kernels.kv_cache import PageScales
from plait_worker.attention import LatentShape
from plait_worker.attention.choice import try_backend
from plait_worker.attention.found import Need, names
from plait_worker.attention.torch_latent import TorchLatentAttention
from plait_worker.models import Model, load_model
from plait_worker.parallel import Parallel
from recording import Record
from torch import Tensor

pytestmark = pytest.mark.gpu
CONTEXT_CHUNK = 1024
LIMIT = 1.5
# FlashMLA rounds queries and the softmax's weights to float8 where the pages are float8.
LIMIT_FLASHMLA_FP8 = 4.0
FP8_SCALES = PageScales(0.37, 1.0)


def save_random(path: Path, num_heads: int, q_rank: int | None) -> None:
    """Two dense layers: an expert that rounding turns to would hide what attention does."""
    torch.manual_seed(num_heads)
    config = transformers.DeepseekV3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=q_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)


def torch_attention(model: Model[Any]) -> TorchLatentAttention:
    assert isinstance(model.attention_shape, LatentShape)
    return TorchLatentAttention(model.attention_shape, PAGE_SIZE, CONTEXT_CHUNK, GPU)


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("num_heads", "q_rank"), [(16, None), (128, 256)])
def test_backends_round_no_worse_than_torch(num_heads: int, q_rank: int | None, tmp_path: Path, record: Record) -> None:
    save_random(tmp_path, num_heads, q_rank)
    ids = torch.randint(2048, (NUM_TOKENS,), generator=torch.Generator().manual_seed(num_heads)).tolist()
    exact = load_model(tmp_path, "float32", GPU, Parallel())
    right = logprobs(exact, torch_attention(exact), ids)
    for fp8, kind in ((None, ""), (FP8_SCALES, " float8")):
        model = load_model(tmp_path, "bfloat16", GPU, Parallel(), fp8=fp8)
        hold_against_torch(model, ids, right, f"{num_heads} heads{kind}", record)


def hold_against_torch(
    model: Model[Any], ids: list[int], right: tuple[Tensor, Tensor], what: str, record: Record
) -> None:
    """Every backend's divergence from ``right`` against the torch backend's, of prefill and of decode steps."""
    rounded = logprobs(model, torch_attention(model), ids)
    for name in names(LatentShape, (9, 0)):
        most = LIMIT_FLASHMLA_FP8 if name == "flashmla" and "float8" in what else LIMIT
        outcome = try_backend(name, Need(model.attention_shape, PAGE_SIZE, CONTEXT_CHUNK, 2 * NUM_TOKENS, GPU))
        assert not isinstance(outcome, str), outcome
        given = logprobs(model, outcome, ids)
        for kind, *three in zip(("prefill", "decode"), right, rounded, given, strict=True):
            of_torch, of_backend = (divergence(three[0], bf16) for bf16 in three[1:])
            for statistic, quantile in (("median", 0.5), ("p99", 0.99)):
                value, limit = float(of_backend.quantile(quantile)), most * float(of_torch.quantile(quantile))
                record(f"{name} {what} {kind}", f"kl_{statistic}", "nats", value, limit)
                assert value <= limit
