"""The CPU's backend of either kind of attention."""

from __future__ import annotations

import logging

from plait_worker.attention import AttentionShape, LatentShape
from plait_worker.attention.paged import PagedAttention
from plait_worker.attention.paged_latent import PagedLatentAttention
from plait_worker.attention.torch import TorchAttention
from plait_worker.attention.torch_latent import TorchLatentAttention

_log = logging.getLogger(__name__)


def cpu_attention(
    shape: AttentionShape | LatentShape, page_size: int, context_chunk: int
) -> PagedAttention | TorchAttention | PagedLatentAttention | TorchLatentAttention:
    """What the model's shape asks for, compiled where the kernels take it; the log says which.

    ``page_size`` and ``context_chunk`` (of latent attention) in tokens.
    """
    chosen = _latent(shape, page_size, context_chunk) if isinstance(shape, LatentShape) else _paged(shape, page_size)
    _log.info("attention: %s", type(chosen).__name__)
    return chosen


def _paged(shape: AttentionShape, page_size: int) -> PagedAttention | TorchAttention:
    return PagedAttention(shape, page_size) if PagedAttention.takes(shape) else TorchAttention(shape, page_size)


def _latent(shape: LatentShape, page_size: int, context_chunk: int) -> PagedLatentAttention | TorchLatentAttention:
    backend = PagedLatentAttention if PagedLatentAttention.takes(shape) else TorchLatentAttention
    return backend(shape, page_size, context_chunk)
