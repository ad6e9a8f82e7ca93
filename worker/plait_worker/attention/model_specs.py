"""The attention specs of a model's layers, from its configuration."""

from __future__ import annotations

from dataclasses import replace

import torch
from plait_kernels.kv_cache import FP8, PageScales

from plait_worker.attention.spec import AttentionSpec, MhaShape, MlaShape
from plait_worker.model_config import MlaConfig, ModelConfig
from plait_worker.parallel import shard_heads


def attention_specs(
    config: ModelConfig, rank: int, world: int, dtype: torch.dtype, fp8: PageScales | None = None
) -> list[AttentionSpec]:
    """One for each layer on this rank of ``world``; ``fp8`` are the scales of a float8 cache.

    Raises ``ValueError`` if MLA gets two different scales.
    """
    heads, kv_heads = shard_heads(config.num_heads, config.num_kv_heads, rank, world)
    if config.mla is not None:
        return [mla_shape(config.mla, len(heads), dtype, fp8)] * config.num_layers
    full = MhaShape(len(heads), len(kv_heads), config.head_dim, config.head_dim**-0.5, dtype, fp8)
    window = replace(full, window=config.sliding_window)
    return [window if kind.cache == "sliding_window" else full for kind in config.layer_kinds]


def mla_shape(mla: MlaConfig, num_heads: int, dtype: torch.dtype, fp8: PageScales | None) -> MlaShape:
    """Of one layer; see ``attention_specs``."""
    return MlaShape(
        num_heads=num_heads,
        latent_dim=mla.latent_dim,
        cached_dim=mla.cached_dim,
        query_dim=mla.query_dim,
        value_dim=mla.value_dim,
        scale=mla.scale,
        dtype=dtype,
        cached_dtype=dtype if fp8 is None else FP8,
        cached_scale=1.0 if fp8 is None else _latent_scale(fp8),
    )


def _latent_scale(fp8: PageScales) -> float:
    """A latent is key and value at once, so it has one scale."""
    if fp8.v not in (1.0, fp8.k):
        raise ValueError(
            f"--v-scale {fp8.v:g}: in MLA (DeepSeek) the cached latent is key and value at once, with one scale; set "
            f"--k-scale and leave out --v-scale"
        )
    return fp8.k
