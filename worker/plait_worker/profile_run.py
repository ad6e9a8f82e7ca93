"""The profile run: a GPU's activation memory, measured by running the largest steps once.

It also compiles and loads kernels that the first real step would wait for. A second run, after everything is allocated,
fills torch's caching allocator: a later allocation by the driver would wait for running kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from plait_kernels.sampling import Filters, sample_filtered, sample_greedy, sample_random, score_tokens, uniform
from plait_proto import WorkerConfig
from torch import Tensor

from plait_worker.attention.model_attention import ModelAttention
from plait_worker.cache import KVCache
from plait_worker.graph_sizes import GraphSize
from plait_worker.models.model import Model
from plait_worker.rows import Rows
from plait_worker.sample import SLICE
from plait_worker.transfer import upload

_MIXED_START, _MIXED_LENGTH = 64, 1024
_MIXED_DECODE = (1, 40)
"""Decode rows of those mixed steps: kernels take larger tiles between these two."""
_CONTEXT = 32_768
"""Context of a long prompt's last chunk: kernels that copy or upcast context do so for no more tokens at a time."""
_GRAPH_BYTES = 2 << 30
"""Reserved for CUDA graphs of few tokens: one pool of the largest step, and the driver's memory for each graph."""
_FEW_TOKENS = 4096
_PARTS = 8
"""Steps of one to eight eighths of the largest are run too."""
_MAX_BEST = 20
"""Best tokens that a request may want with each token."""
_PINNED_BYTES, _PINNED_COUNT = tuple(1 << power for power in range(9, 20)), 16
"""Sizes of pinned memory, which torch allocates in powers of two, and how many of each the steps in flight may use."""


@torch.inference_mode()
def measure_activation_bytes(
    config: WorkerConfig,
    model: Model[Any],
    attention: ModelAttention,
    device: torch.device,
    graph_sizes: Sequence[GraphSize] = (),
) -> int:
    """Peak bytes of the largest steps, and of the graphs that are captured later."""
    cache = KVCache(model.cache_specs, 1, config.pages.page_size, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_steps(config, model, attention, cache)
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak + _graph_bytes(graph_sizes, peak)


def _graph_bytes(sizes: Sequence[GraphSize], peak: int) -> int:
    """Of all graphs, if the largest step takes ``peak``: the pool of graphs of many tokens takes as much."""
    if not sizes:
        return 0
    return _GRAPH_BYTES + (peak if sizes[-1].num_tokens > _FEW_TOKENS else 0)


@torch.inference_mode()
def fill_allocators(config: WorkerConfig, model: Model[Any], attention: ModelAttention, cache: KVCache) -> None:
    """Fill torch's allocators of device memory and pinned memory with what steps need.

    Other sizes than the largest choose other kernels, and a kernel's first use waits for what the device computes.
    """
    run_largest_steps(config, model, attention, cache)
    for part in range(1, _PARTS + 1):
        prompts = _prompts(-(-config.max_batch_tokens * part // _PARTS), config.max_model_len)
        rows = _rows(cache, [0] * len(prompts), prompts, len(prompts))
        hidden_TD = model.forward(rows, cache, attention.prepare(rows))
    for num_rows in _head_rows(min(config.max_seqs, config.max_batch_tokens)):
        logits_SU = model.shard_logits(hidden_TD[:1].expand(num_rows, -1).contiguous())
        model.greedy_ids(logits_SU)
    for num_bytes in _PINNED_BYTES:
        _blocks = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_PINNED_COUNT)]


def _head_rows(most: int) -> Iterator[int]:
    """Numbers of rows that sample: all up to 256, then every 64th."""
    yield from range(1, min(most, 256) + 1)
    yield from range(320, most + 1, 64)


def run_largest_steps(config: WorkerConfig, model: Model[Any], attention: ModelAttention, cache: KVCache) -> None:
    """Over the dummy page alone."""
    for rows in _largest_steps(config, cache):
        hidden_TD = model.forward(rows, cache, attention.prepare(rows))
        logits_SV = _largest_head(config, model, hidden_TD)
        logits_SV.softmax(dim=-1)
        del logits_SV
        asked_CV = model.logits(hidden_TD[:SLICE])
        score_tokens(asked_CV, rows.token_ids_T[:SLICE], min(_MAX_BEST, asked_CV.shape[1]))
        logits_SU = model.shard_logits(_sampling_rows(config, hidden_TD))
        model.greedy_ids(logits_SU)
        model.own_rows_of_logits(logits_SU)
        _run_samplers(model.whole_logits(logits_SU))


def _largest_steps(config: WorkerConfig, cache: KVCache) -> Iterator[Rows]:
    """Whole prompts; the last chunk of a long prompt; chunks with few and with more decode rows.

    The last take kernels that no other step does.
    """
    prompts = _prompts(config.max_batch_tokens, config.max_model_len)
    yield _rows(cache, [0] * len(prompts), prompts, len(prompts))
    most = min(_CONTEXT, config.max_model_len)
    length = min(_MIXED_LENGTH, config.max_batch_tokens)
    if length < most:
        yield _rows(cache, [most - length], [length], 1)
    for num_decode in _MIXED_DECODE:
        length = min(_MIXED_LENGTH, config.max_batch_tokens - num_decode, max(prompts) - _MIXED_START)
        if length >= 1 and num_decode < config.max_seqs:
            yield _rows(cache, [_MIXED_START] * (num_decode + 1), [length] + [1] * num_decode, 1)


def _prompts(num_tokens: int, longest: int) -> list[int]:
    """A step's tokens as whole prompts."""
    whole, rest = divmod(num_tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _largest_head(config: WorkerConfig, model: Model[Any], hidden_TD: Tensor) -> Tensor:
    """Their logits."""
    return model.logits(_sampling_rows(config, hidden_TD))


def _sampling_rows(config: WorkerConfig, hidden_TD: Tensor) -> Tensor:
    """Hidden states of as many rows as can sample in one step."""
    num_rows = min(config.max_seqs, config.max_batch_tokens)
    return hidden_TD[:1].expand(num_rows, -1).contiguous()


def _run_samplers(logits_SV: Tensor) -> None:
    """Each sampler once: the first use compiles its kernels, which takes two seconds."""
    sample_greedy(logits_SV)
    ones_S = torch.ones(len(logits_SV), device=logits_SV.device)
    zeros_S = torch.zeros(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
    uniform_S = uniform(zeros_S, zeros_S)
    sample_random(logits_SV, ones_S, zeros_S.float(), uniform_S)
    sample_filtered(logits_SV, ones_S, Filters(zeros_S + 1, ones_S / 2, zeros_S.float()), uniform_S)


def _rows(cache: KVCache, starts: list[int], lengths: list[int], num_prefill: int) -> Rows:
    """Rows whose every page is the dummy page."""
    device, page_size = cache.layers[0].device, cache.page_size
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = -(-max(ends) // page_size)
    width += -width % 4
    return Rows(
        num_prefill=num_prefill,
        slots=list(range(len(lengths))),
        starts=starts,
        lengths=lengths,
        token_ids_T=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
        positions_T=upload(np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)]), device),
        page_table_RW=torch.full((len(lengths), width), cache.dummy_page, dtype=torch.int32, device=device),
        sample_index_S=upload(np.cumsum(lengths) - 1, device),
    )
