"""What a GPU needs beside weights and pages, measured by running the largest step once.

That run also compiles and loads what the first real step would otherwise wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from plait_proto import WorkerConfig
from torch import Tensor

from plait_worker.attention import AttentionBackend
from plait_worker.cache import KVCache
from plait_worker.models import Model
from plait_worker.rows import Rows
from plait_worker.transfer import upload

_MIXED_START, _MIXED_LENGTH = 64, 1024
_MIXED_DECODE = (1, 40)
"""Decode rows beside it: on either side of where kernels take larger tiles."""
_GRAPH_BYTES = 2 << 30
"""Set aside for captured graphs: one pool as large as their largest step, and what the driver keeps of each."""


@torch.inference_mode()
def measure_working_bytes(
    config: WorkerConfig, model: Model[Any], attention: AttentionBackend[Any], device: torch.device
) -> int:
    """Bytes that the largest step and the captured graphs take."""
    lengths = _largest_prompts(config)
    pages_per_row = -(-max(lengths) // config.page_size)
    cache = KVCache(model.cache_spec, len(lengths) * pages_per_row, config.page_size, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rows = _rows(lengths, pages_per_row, device)
    hidden_TD = model.forward(rows, cache, attention.prepare(rows))
    for mixed in _mixed(config, rows):
        model.forward(mixed, cache, attention.prepare(mixed))
    logits_SV = _largest_head(config, model, hidden_TD)
    logits_SV.softmax(dim=-1)
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak + (_GRAPH_BYTES if config.device.cuda_graphs and attention.is_capturable else 0)


def _mixed(config: WorkerConfig, whole: Rows) -> Iterator[Rows]:
    """Steps of a prompt's second chunk beside few and more decode rows, which take kernels that no other step does."""
    start, device = _MIXED_START, whole.positions_T.device
    for num_decode in _MIXED_DECODE:
        length = min(_MIXED_LENGTH, config.max_batch_tokens - num_decode, max(whole.lengths) - start)
        if length < 1 or num_decode >= config.max_seqs:
            return
        starts, lengths = [start] * (num_decode + 1), [length] + [1] * num_decode
        positions = [np.arange(at, at + num) for at, num in zip(starts, lengths, strict=True)]
        yield Rows(
            num_prefill=1,
            slots=list(range(len(lengths))),
            starts=starts,
            lengths=lengths,
            token_ids_T=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
            positions_T=upload(np.concatenate(positions), device),
            page_table_RW=whole.page_table_RW[:1].repeat(len(lengths), 1),
            sample_index_S=upload(np.cumsum(lengths) - 1, device),
        )


def _largest_prompts(config: WorkerConfig) -> list[int]:
    """One step's tokens as whole prompts."""
    whole, rest = divmod(config.max_batch_tokens, config.max_model_len)
    return [config.max_model_len] * whole + [rest] * (rest > 0)


def _largest_head(config: WorkerConfig, model: Model[Any], hidden_TD: Tensor) -> Tensor:
    """Logits of as many rows as can sample in one step."""
    num_rows = min(config.max_seqs, config.max_batch_tokens)
    return model.logits(hidden_TD[:1].expand(num_rows, -1).contiguous())


def _rows(lengths: list[int], pages_per_row: int, device: torch.device) -> Rows:
    width = pages_per_row + -pages_per_row % 4
    table_RW = np.full((len(lengths), width), len(lengths) * pages_per_row, dtype=np.int32)
    table_RW[:, :pages_per_row] = np.arange(len(lengths) * pages_per_row).reshape(len(lengths), -1)
    return Rows(
        num_prefill=len(lengths),
        slots=list(range(len(lengths))),
        starts=[0] * len(lengths),
        lengths=lengths,
        token_ids_T=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
        positions_T=upload(np.concatenate([np.arange(length) for length in lengths]), device),
        page_table_RW=upload(table_RW, device),
        sample_index_S=upload(np.cumsum(lengths) - 1, device),
    )
