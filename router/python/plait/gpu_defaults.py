"""Batch sizes that fit a GPU and a model, for `plait serve` without `--max-num-seqs` or `--max-num-batched-tokens`.

The constants come from five loads of two shapes on one H200 (docs/performance.md, "Defaults on a GPU").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from plait._router import model_size

MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 2048, 8192
MIN_SEQS, MAX_SEQS = 64, 1024
TOKENS_PER_REQUEST = 512
"""KV tokens that one request is expected to hold. Longer ones wait for pages, not for slots."""
MAX_STEP_FLOPS = 1e14
"""Of one rank. A Hopper GPU takes 0.15 s, which bounds the gap between two tokens of a stream."""
MAX_ACTIVATION_SHARE = 0.05
"""Of a GPU's memory, for the activations of the largest step."""
ACTIVATION_BYTES_PER_HIDDEN = 80
"""Bytes that one token of a step takes for each element of the hidden state, measured over two shapes."""
MEMORY_FRACTION = 0.9


class ModelSize(msgspec.Struct, frozen=True):
    """What batch sizes follow from; of the whole model. `_router.model_size` gives it as JSON."""

    weight_bytes: float
    parameters_per_token: float
    """Parameters that one token is multiplied with: all of a dense model, the chosen experts of an MoE."""
    kv_bytes_per_token: float
    hidden_size: float


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """Batch sizes and why they are what they are."""

    max_seqs: int
    max_batch_tokens: int
    reason: str


def read_model_size(model: Path) -> ModelSize | None:
    """The size that a folder's `config.json` gives; None for a GGUF file or an unknown shape."""
    try:
        return msgspec.json.decode(model_size(str(model / "config.json")), type=ModelSize)
    except (ValueError, OSError):
        return None


def gpu_defaults(size: ModelSize | None, memory_bytes: int | None, num_ranks: int) -> BatchDefaults:
    """Batch sizes for ranks with `memory_bytes` each; the smallest ones where a size is unknown."""
    if size is None or memory_bytes is None:
        unknown = "the model's size" if size is None else "the GPU's memory"
        return BatchDefaults(MIN_SEQS, MIN_BATCH_TOKENS, f"{unknown} is unknown")
    num_tokens = _kv_tokens(size, memory_bytes, num_ranks)
    max_seqs = _round_down(num_tokens / TOKENS_PER_REQUEST, MIN_SEQS, MIN_SEQS, MAX_SEQS)
    max_batch_tokens = _batch_tokens(size, memory_bytes, num_ranks)
    reason = (
        f"{memory_bytes / 1e9:.0f} GB hold the weights and about {num_tokens:,.0f} tokens of KV cache; "
        f"a token takes {2 * size.parameters_per_token / num_ranks / 1e9:.1f} GFLOP"
    )
    return BatchDefaults(max_seqs, max_batch_tokens, reason)


def _kv_tokens(size: ModelSize, memory_bytes: int, num_ranks: int) -> float:
    kv_bytes = memory_bytes * MEMORY_FRACTION - size.weight_bytes / num_ranks
    return max(0.0, kv_bytes) / (size.kv_bytes_per_token / num_ranks)


def _batch_tokens(size: ModelSize, memory_bytes: int, num_ranks: int) -> int:
    """The largest power of two whose step is short enough and whose activations fit."""
    by_time = MAX_STEP_FLOPS * num_ranks / (2 * size.parameters_per_token)
    by_memory = memory_bytes * MAX_ACTIVATION_SHARE / (size.hidden_size * ACTIVATION_BYTES_PER_HIDDEN)
    wanted = min(by_time, by_memory)
    fitting = (tokens for tokens in (8192, 4096) if tokens <= min(wanted, MAX_BATCH_TOKENS))
    return next(fitting, MIN_BATCH_TOKENS)


def _round_down(value: float, step: int, least: int, most: int) -> int:
    return max(least, min(most, int(value) // step * step))
