"""Activation memory of a CPU's largest step, estimated from the model's sizes without a profile run.

It counts the arrays that are alive at the same time, as if each rank held the whole model. What torch and the C library
need besides fits into the fraction of memory that no setting gives to pages.
"""

from __future__ import annotations

from plait_proto import WorkerConfig

from plait_worker.attention.compressed import torch_compressed
from plait_worker.attention.torch_batches import MAX_GATHERED, QUERY_BLOCK
from plait_worker.model_config import CompressedConfig, MlaConfig, ModelConfig

_FLOAT32 = 4
_INT64 = 8
_LOGIT_ARRAYS = 3
"""Of all rows that sample: the logits, and two arrays that random sampling makes of them."""
_RECORD_TOKENS = 256
"""Prompt tokens whose logits exist at a time, twice, if prompt log-probabilities are requested (``sample``)."""


def cpu_activation_bytes(
    config: WorkerConfig, model: ModelConfig, itemsize: int, gathered_itemsize: int | None = None
) -> int:
    """Bytes of the largest step's activations, logits and temporary keys and values; ``itemsize`` of the model's.

    ``gathered_itemsize`` is that of the pages if attention copies them, as torch's does; else None.
    """
    num_tokens = config.max_batch_tokens
    num_logits = _LOGIT_ARRAYS * min(config.max_seqs, num_tokens) + 2 * min(_RECORD_TOKENS, num_tokens)
    of_logits = num_logits * model.vocab_size * _FLOAT32
    of_layers = num_tokens * _token_bytes(model, itemsize) + _kv_up_bytes(config, model, itemsize)
    gathered = 0 if gathered_itemsize is None else _gathered_bytes(config, model, itemsize, gathered_itemsize)
    return of_logits + of_layers + gathered


def _token_bytes(model: ModelConfig, itemsize: int) -> int:
    """Of one token in a layer: the residual stream in float32, inputs and outputs of attention and MLP."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if model.mla is not None:
        heads = model.num_heads * (model.mla.cached_dim + model.mla.query_dim) + 2 * model.mla.cached_dim
    # Norms and rope pass through float32, and a GEMM may keep its inputs rounded as well.
    attention = itemsize * (2 * model.hidden_size + 2 * heads) + 2 * _FLOAT32 * heads
    return (
        2 * _FLOAT32 * model.hidden_size + attention + max(_dense_bytes(model, itemsize), _moe_bytes(model, itemsize))
    )


def _dense_bytes(model: ModelConfig, itemsize: int) -> int:
    """Gate and up, their elementwise combination, and that rounded."""
    return itemsize * 4 * model.intermediate_size


def _moe_bytes(model: ModelConfig, itemsize: int) -> int:
    """The same for each expert of a token, with its input and its float32 output."""
    if model.moe is None:
        return 0
    per_expert = itemsize * (model.hidden_size + 3 * model.moe.intermediate_size) + _FLOAT32 * model.hidden_size
    return model.moe.num_experts_per_token * per_expert + itemsize * 4 * model.moe.shared_size


def _kv_up_bytes(config: WorkerConfig, model: ModelConfig, itemsize: int) -> int:
    """MLA's keys and values of every head, for new tokens and a cached chunk, and partial results to combine."""
    mla: MlaConfig | None = model.mla
    if mla is None:
        return 0
    each = 2 * mla.query_dim + mla.value_dim
    tokens = config.max_batch_tokens + config.attention.mla_context_chunk_size
    merged = 2 * _FLOAT32 * config.max_batch_tokens * mla.value_dim
    return model.num_heads * (tokens * each * itemsize + merged)


def _gathered_bytes(config: WorkerConfig, model: ModelConfig, itemsize: int, gathered_itemsize: int) -> int:
    """Copied pages of a prefill row or a batch of decode rows, their upcast copy, and the masks."""
    if model.compressed is not None:
        return _compressed_bytes(config, model.compressed, model.head_dim)
    numbers = model.mla.cached_dim if model.mla is not None else 2 * model.num_kv_heads * model.head_dim
    longest = -(-config.max_model_len // config.pages.page_size) * config.pages.page_size
    row = numbers * longest
    gathered = min(config.max_seqs * row, max(row, MAX_GATHERED))
    converted = itemsize if gathered_itemsize != itemsize else 0
    masks = itemsize * (QUERY_BLOCK + config.max_seqs) * (longest + QUERY_BLOCK)
    return gathered * (gathered_itemsize + converted) + masks + _padded_bytes(config, model, itemsize)


def _compressed_bytes(config: WorkerConfig, compressed: CompressedConfig, head_dim: int) -> int:
    """The step's lists of entries, and what one call copies: index keys with their scores, or keys of the attention."""
    most = torch_compressed.MAX_GATHERED
    entries = {ratio: config.max_model_len // ratio for ratio in compressed.ratios if ratio}
    # Of every row, with the pages that they are made from.
    lists = 2 * _INT64 * config.max_seqs * sum(entries.values())
    chosen_from = entries.get(compressed.sparse_ratio, 0)
    keys = 2 * max(most, chosen_from * compressed.index_dim)
    scores = 3 * max(most, chosen_from * compressed.num_index_heads)
    seen = [min(num, compressed.top_k) if ratio == compressed.sparse_ratio else num for ratio, num in entries.items()]
    attended = 3 * max(most, (compressed.window + max(seen, default=0)) * head_dim)
    return lists + _FLOAT32 * max(keys + scores, attended)


def _padded_bytes(config: WorkerConfig, model: ModelConfig, itemsize: int) -> int:
    """MLA's queries, keys and values padded to one width for torch's attention."""
    mla: MlaConfig | None = model.mla
    if mla is None:
        return 0
    tokens = config.max_batch_tokens + 2 * max(config.max_batch_tokens, config.attention.mla_context_chunk_size)
    return model.num_heads * tokens * max(mla.query_dim, mla.value_dim) * itemsize
