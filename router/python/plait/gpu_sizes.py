"""Requests at a time, tokens a step and rows of CUDA graphs of a GPU, from its memory and the model's size.

The constants come from five loads of two shapes on one H200 (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

MIN_SEQS, MAX_SEQS = 64, 1024
BATCH_TOKENS = (8192, 4096, 2048)
"""Tokens a step that are considered on a GPU; the last one is always taken if no other fits."""
TOKENS_PER_REQUEST = 512
"""KV tokens expected of one request. Longer requests wait for pages instead of slots."""
MAX_STEP_FLOPS = 1e14
"""Most work of one rank in a step. A Hopper GPU takes 0.15 s for it, which bounds the ITL beside long prompts."""
ACTIVATION_SHARE = 0.05
"""Share of a GPU's memory that the activations of the largest step may take."""
ACTIVATION_BYTES = 80
"""Activations of a token, in bytes for each element of the hidden state."""
MEMORY_FRACTION = 0.9
"""Of a GPU, without `--memory-fraction`; the worker has the same default."""


class ModelSize(msgspec.Struct, frozen=True):
    """Size of the whole model, as `plait._router.model_size` gives it."""

    weight_bytes: float
    parameters_per_token: float
    """Parameters that a token is multiplied with: in an MoE those of its experts alone."""
    kv_bytes_per_token: float
    hidden_size: float


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes and where they come from."""

    max_seqs: int
    max_batch_tokens: int
    reason: str


def gpu_sizes(
    model: ModelSize | None,
    memory_bytes: int | None,
    num_ranks: int,
    memory_fraction: float = MEMORY_FRACTION,
    copies: float = 1.0,
) -> BatchSizes:
    """Batch sizes for ranks with `memory_bytes` each; the smallest if a size is unknown. `copies`: see `kv_copies`."""
    if model is None or memory_bytes is None:
        unknown = "the model's size" if model is None else "the GPU's memory"
        return BatchSizes(MIN_SEQS, BATCH_TOKENS[-1], f"{unknown} is unknown, so these are the smallest")
    kv_tokens = _kv_tokens(model, memory_bytes * memory_fraction, num_ranks) / copies
    flops = 2 * model.parameters_per_token / num_ranks
    limit = min(MAX_STEP_FLOPS / flops, memory_bytes * ACTIVATION_SHARE / (model.hidden_size * ACTIVATION_BYTES))
    return BatchSizes(
        max_seqs=max(MIN_SEQS, min(MAX_SEQS, int(kv_tokens / TOKENS_PER_REQUEST) // 64 * 64)),
        max_batch_tokens=next((tokens for tokens in BATCH_TOKENS if tokens <= limit), BATCH_TOKENS[-1]),
        reason=(
            f"{memory_bytes / 1e9:.0f} GB of GPU memory leave {kv_tokens:,.0f} tokens of KV cache, "
            f"a token takes {flops / 1e9:.1f} GFLOP"
        ),
    )


def kv_copies(config: dict[str, Any], num_ranks: int) -> float:
    """How often so many ranks together hold the KV of a token: a rank has all of MLA's, and a head of GQA at least."""
    if config.get("kv_lora_rank") is not None:
        return num_ranks
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return float(-(-kv_heads // num_ranks) * num_ranks / kv_heads)


def _kv_tokens(model: ModelSize, usable_bytes: float, num_ranks: int) -> float:
    kv_bytes = usable_bytes * num_ranks - model.weight_bytes
    return max(0.0, kv_bytes) / model.kv_bytes_per_token
