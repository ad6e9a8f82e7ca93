"""The attention specs of a model's layers, from its configuration and the kinds of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales
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


def attention_specs(
    config: ModelConfig, rank: int, world: int, dtype: torch.dtype, fp8: Sequence[PageScales] | None = None
) -> list[AttentionSpec]:
    """One for each layer on this rank of ``world``; ``fp8`` are the layers' scales of a float8 cache.

    Raises ``ValueError`` if MLA gets two different scales, or DeepSeek-V4 any.
    """
    heads, kv_heads = shard_heads(config.num_heads, config.num_kv_heads, rank, world)
    shared = _Rank(config, len(heads), len(kv_heads), dtype)
    if config.compressed is not None:
        if fp8 is not None:
            raise ValueError("--kv-cache-dtype fp8: DeepSeek-V4's entries have no kernel for FP8 rows; leave it out")
        return [_compressed(shared, config.compressed, ratio) for ratio in config.compressed.ratios]
    scales = [None] * config.num_layers if fp8 is None else fp8
    return [_SPECS[kind.attention](shared, kind, own) for kind, own in zip(config.layer_kinds, scales, strict=True)]


def _mha(rank: _Rank, kind: LayerKind, fp8: PageScales | None) -> AttentionSpec:
    return MhaShape(
        num_heads=rank.num_heads,
        num_kv_heads=rank.num_kv_heads,
        head_dim=rank.config.head_dim,
        scale=rank.config.head_dim**-0.5,
        dtype=rank.dtype,
        is_fp8=fp8 is not None,
        window=rank.config.sliding_window if kind.cache == "sliding_window" else None,
        scales=fp8 or UNSCALED,
    )


def _mla(rank: _Rank, _kind: LayerKind, fp8: PageScales | None) -> AttentionSpec:
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
        cached_dtype=rank.dtype if fp8 is None else FP8,
        cached_scale=1.0 if fp8 is None else _latent_scale(fp8),
    )


def _compressed(rank: _Rank, attention: CompressedConfig, ratio: int) -> AttentionSpec:
    shape = CompressedShape(rank.num_heads, rank.config.head_dim, attention.window, ratio, rank.dtype)
    if ratio != attention.sparse_ratio:
        return shape
    return replace(
        shape, index_dim=attention.index_dim, num_index_heads=attention.num_index_heads, top_k=attention.top_k
    )


_SPECS: dict[str, Callable[[_Rank, LayerKind, PageScales | None], AttentionSpec]] = {
    MhaShape.kind: _mha,
    MlaShape.kind: _mla,
}
"""By ``LayerKind.attention``."""


def _latent_scale(fp8: PageScales) -> float:
    """A latent is key and value at once, so it has one scale."""
    if fp8.v not in (1.0, fp8.k):
        raise ValueError(
            f"--v-scale {fp8.v:g}: in MLA (DeepSeek) the cached latent is key and value at once, with one scale; set "
            f"--k-scale and leave out --v-scale"
        )
    return fp8.k
