"""The CPU's backend of either kind of attention."""

from __future__ import annotations

from plait_worker.attention import AttentionShape, LatentShape
from plait_worker.attention.torch import TorchAttention
from plait_worker.attention.torch_latent import TorchLatentAttention


def cpu_attention(
    shape: AttentionShape | LatentShape, page_size: int, context_chunk: int
) -> TorchAttention | TorchLatentAttention:
    """What the model's shape asks for; ``page_size`` and ``context_chunk`` (of latent attention) in tokens."""
    if isinstance(shape, LatentShape):
        return TorchLatentAttention(shape, page_size, context_chunk)
    return TorchAttention(shape, page_size)
