"""The CPU's backend of either kind of attention."""

from __future__ import annotations

import logging

from plait_worker.attention import AttentionShape, LatentShape
from plait_worker.attention.paged import PagedAttention
from plait_worker.attention.torch import TorchAttention
from plait_worker.attention.torch_latent import TorchLatentAttention

_log = logging.getLogger(__name__)


def cpu_attention(
    shape: AttentionShape | LatentShape, page_size: int, context_chunk: int
) -> PagedAttention | TorchAttention | TorchLatentAttention:
    """What the model's shape asks for, compiled where the kernels take it; the log says which.

    ``page_size`` and ``context_chunk`` (of latent attention) in tokens.
    """
    if isinstance(shape, LatentShape):
        return TorchLatentAttention(shape, page_size, context_chunk)
    backend = PagedAttention if PagedAttention.takes(shape) else TorchAttention
    _log.info("attention: %s", backend.__name__)
    return backend(shape, page_size)
