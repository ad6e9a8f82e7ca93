"""Requests at a time, tokens a step and rows of CUDA graphs, where the user gives none.

On a GPU they follow from its memory and the model's size. The constants come from five loads of two shapes on one
H200 (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from plait_proto import UNDECODABLE

from plait._router import model_size
from plait.errors import SettingsError
from plait.nvidia import gpu_memory_bytes, has_nvidia_gpu
from plait.settings import SchedulerSettings, ServeSettings

CPU_SEQS = 64
"""Over 64 rows a CPU hardly gains throughput, while each request's ITL grows."""
CPU_BATCH_TOKENS = 160
"""On two cores such a step takes 0.1 s with a 135M model. Larger steps do not raise the throughput."""
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


CPU_SIZES = BatchSizes(CPU_SEQS, CPU_BATCH_TOKENS, "a CPU hardly gains from more")


def with_batch_sizes(
    settings: ServeSettings, model: Path, gpu_memory: Callable[[], int | None] = gpu_memory_bytes
) -> tuple[ServeSettings, str]:
    """The settings with all batch sizes filled in, and the reason for those that the user left open."""
    given = settings.scheduler
    if given.max_seqs is not None and given.max_batch_tokens is not None:
        return settings, "as given"
    sizes = CPU_SIZES
    if uses_gpu(settings):
        fraction = settings.pages.memory_fraction or MEMORY_FRACTION
        size, copies = _size_of(model, settings.process.tp)
        sizes = gpu_sizes(size, gpu_memory(), settings.process.tp, fraction, copies)
    filled = msgspec.structs.replace(
        given,
        max_seqs=given.max_seqs or sizes.max_seqs,
        max_batch_tokens=given.max_batch_tokens or sizes.max_batch_tokens,
    )
    return msgspec.structs.replace(settings, scheduler=filled), sizes.reason


def check_chunk(scheduler: SchedulerSettings) -> None:
    """Raise `SettingsError` for a chunk that no step holds."""
    chunk, budget = scheduler.long_prefill_token_threshold, scheduler.max_batch_tokens
    if chunk is not None and budget is not None and chunk > budget:
        raise SettingsError(
            f"--long-prefill-token-threshold is {chunk}; 1 to {budget} are allowed, the tokens of a step: lower it, "
            "or raise --max-batch-tokens"
        )


def uses_gpu(settings: ServeSettings) -> bool:
    """Whether the workers will compute on a GPU."""
    device = settings.device.device
    return device == "cuda" or (device == "auto" and has_nvidia_gpu())


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


def _size_of(model: Path, num_ranks: int) -> tuple[ModelSize | None, float]:
    """And the copies of its KV. None for a GGUF file and for a configuration without the sizes."""
    path = model / "config.json"
    try:
        size = msgspec.json.decode(model_size(str(path)), type=ModelSize)
        return size, kv_copies(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]), num_ranks)
    except (ValueError, OSError, LookupError, TypeError, *UNDECODABLE):
        return None, 1.0


def _kv_tokens(model: ModelSize, usable_bytes: float, num_ranks: int) -> float:
    kv_bytes = usable_bytes * num_ranks - model.weight_bytes
    return max(0.0, kv_bytes) / model.kv_bytes_per_token
