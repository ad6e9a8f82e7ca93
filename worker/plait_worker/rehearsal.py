"""What a GPU's steps take of our kernels, compiled by all cores before the first of them runs.

Compiled one by one as they come up, they take a start without Triton's cache longer than all else that it does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from plait_kernels.sampling import pick_greedy, prepare
from plait_proto import WorkerConfig

from plait_worker.attention import AttentionBackend
from plait_worker.cache import KVCache
from plait_worker.machine import num_usable_cores
from plait_worker.models import Model
from plait_worker.rows import Rows
from plait_worker.working_space import dummy_rows, whole_prompts

_log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
"""Steps of others take few of our kernels, and read on the host what those would have written."""
_DECODE_ROWS = tuple(1 << power for power in range(10))
_PROMPT_TOKENS = tuple(1 << power for power in range(7, 13))
"""Kernels for other numbers of rows or tokens are those of the next power of two."""
_HEAD_ROWS = 65
"""The head's kernels differ by the number of rows up to one less."""


def compile_ahead(
    config: WorkerConfig, model: Model[Any], attention: AttentionBackend[Any], device: torch.device
) -> None:
    """Have our kernels ready to be launched, as far as can be foreseen; others are compiled as they come up.

    ``attention`` is left with what no kernel wrote in its buffers.
    """
    if model.dtype not in _DTYPES:
        return
    from plait_kernels.ahead import rehearsal

    cache = KVCache(model.cache_spec, 1, config.page_size, device)
    # What cannot be compiled fails again, and is told of, where it is first used.
    with ThreadPoolExecutor(1) as aside, rehearsal(num_usable_cores()) as ready:
        aside.submit(prepare, model.dtype, device)
        run_steps(config, model, attention, cache)
    _log.info("%d of our kernels are ready", len(ready))


@torch.inference_mode()
def run_steps(config: WorkerConfig, model: Model[Any], attention: AttentionBackend[Any], cache: KVCache) -> None:
    """One step of each size that kernels are chosen by, over the dummy page."""
    for rows in _steps(config, model, cache):
        hidden_TD = model.forward(rows, cache, attention.prepare(rows))
    for num_rows in range(1, min(_HEAD_ROWS, config.max_seqs, config.max_batch_tokens) + 1):
        logits_SV = model.rounded_logits(hidden_TD[:1].expand(num_rows, -1).contiguous())
    pick_greedy(logits_SV)


def _steps(config: WorkerConfig, model: Model[Any], cache: KVCache) -> Iterator[Rows]:
    """Decode rows, then prompts: many sizes of these where experts sort the tokens, else one."""
    sizes = _PROMPT_TOKENS if model.config.moe is not None else _PROMPT_TOKENS[:1]
    for num_tokens in sorted({min(size, config.max_batch_tokens) for size in sizes}):
        prompts = whole_prompts(num_tokens, config.max_model_len)
        yield dummy_rows(cache, [0] * len(prompts), prompts, len(prompts))
    most = min(config.max_seqs, config.max_batch_tokens)
    for num_rows in sorted({min(rows, most) for rows in _DECODE_ROWS}):
        yield dummy_rows(cache, [0] * num_rows, [1] * num_rows, 0)
