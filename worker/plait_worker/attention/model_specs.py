"""The attention specs of a model's layers, from its configuration and the kinds of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from plait_kernels.kv_cache import FP8, PageScales
from plait_proto import LayerKind

from plait_worker.attention.spec import AttentionSpec, CompressedShape, MhaShape, MlaShape
from plait_worker.model_config import CompressedConfig, ModelConfig
from plait_worker.parallel import shard_heads


@dataclass(frozen=True, slots=True)
class _Rank:
    """What the specs of one rank's layers share."""

    config: ModelConfig
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    fp8: PageScales | None


def attention_specs(
    config: ModelConfig, rank: int, world: int, dtype: torch.dtype, fp8: PageScales | None = None
) -> list[AttentionSpec]:
    """One for each layer on this rank of ``world``; ``fp8`` are the scales of a float8 cache.

    Raises ``ValueError`` if MLA gets two different scales, or DeepSeek-V4 any.
    """
    heads, kv_heads = shard_heads(config.num_heads, config.num_kv_heads, rank, world)
    shared = _Rank(config, len(heads), len(kv_heads), dtype, fp8)
    if config.compressed is not None:
        return [_compressed(shared, config.compressed, ratio) for ratio in config.compressed.ratios]
    return [_SPECS[kind.attention](shared, kind) for kind in config.layer_kinds]


def _mha(rank: _Rank, kind: LayerKind) -> AttentionSpec:
    head_dim = rank.config.head_dim
    window = rank.config.sliding_window if kind.cache == "sliding_window" else None
    return MhaShape(rank.num_heads, rank.num_kv_heads, head_dim, head_dim**-0.5, rank.dtype, rank.fp8, window)


def _mla(rank: _Rank, _kind: LayerKind) -> AttentionSpec:
    mla = rank.config.mla
    if mla is None:
        raise AssertionError(f"{rank.config.architecture} without MLA")
    return MlaShape(
        num_heads=rank.num_heads,
        latent_dim=mla.latent_dim,
        cached_dim=mla.cached_dim,
        query_dim=mla.query_dim,
        value_dim=mla.value_dim,
        scale=mla.scale,
        dtype=rank.dtype,
        cached_dtype=rank.dtype if rank.fp8 is None else FP8,
        cached_scale=1.0 if rank.fp8 is None else _latent_scale(rank.fp8),
    )


def _compressed(rank: _Rank, attention: CompressedConfig, ratio: int) -> AttentionSpec:
    if rank.fp8 is not None:
        raise ValueError("--kv-cache-dtype fp8: DeepSeek-V4's entries have no kernel for FP8 rows yet; leave it out")
    shape = CompressedShape(rank.num_heads, rank.config.head_dim, attention.window, ratio, rank.dtype)
    if ratio != attention.sparse_ratio:
        return shape
    return replace(
        shape, index_dim=attention.index_dim, num_index_heads=attention.num_index_heads, top_k=attention.top_k
    )


_SPECS: dict[str, Callable[[_Rank, LayerKind], AttentionSpec]] = {MhaShape.kind: _mha, MlaShape.kind: _mla}
"""By ``LayerKind.attention``."""


def _latent_scale(fp8: PageScales) -> float:
    """A latent is key and value at once, so it has one scale."""
    if fp8.v not in (1.0, fp8.k):
        raise ValueError(
            f"--v-scale {fp8.v:g}: in MLA (DeepSeek) the cached latent is key and value at once, with one scale; set "
            f"--k-scale and leave out --v-scale"
        )
    return fp8.k
