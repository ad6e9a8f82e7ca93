"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): MLA, routed and shared experts.

Shapes: T tokens of a step, B its decode rows, N any tokens, D the hidden size, H heads of this rank; elements of a
head: E of a query and key (rope's are last), O of those without rope, V of a value; Q of the queries' latent, L of the
latent of keys and values, C cached of a token (that latent, then the shared rope key).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from plait_kernels.mla import (
    AbsorbedQueries,
    CacheTarget,
    MlaNorm,
    Tables,
    absorb,
    absorb_and_cache,
    rope_and_cache,
    up_project_values,
)
from plait_proto import family
from torch import Tensor

from plait_worker.attention.backend import MlaStep
from plait_worker.layers.kv_b_proj import kv_up_projection
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.mlp import GatedMlp, SparseMlp
from plait_worker.layers.norm import RmsNorm
from plait_worker.model_config import MlaConfig, ModelConfig
from plait_worker.models.block import Block, Step
from plait_worker.models.decoder import Decoder
from plait_worker.models.family import FamilySpec
from plait_worker.models.fused import rmsnorm_matmul
from plait_worker.parallel import Parallel, Shard
from plait_worker.rank_sums import Summand
from plait_worker.weights.deepseek_config import read_v2_mla, read_v2_moe, read_v3_mla, read_v3_moe
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.reader import Weights

_WHOLE = Parallel()
"""Not sharded: every head of every rank reads the whole latent."""
_LATENT_EPS = 1e-6
"""Of the norms inside MLA; ``rms_norm_eps`` is the others'."""


class DirectQueries:
    """Queries from the hidden state (V2-Lite), in one GEMM with the cached latent."""

    def __init__(self, config: ModelConfig, mla: MlaConfig, weights: Weights, parallel: Parallel) -> None:
        """Read ``q_proj`` and ``kv_a_proj_with_mqa``."""
        queries = Projection("q_proj", config.num_heads, mla.query_dim, has_bias=False)
        latent = Projection("kv_a_proj_with_mqa", mla.cached_dim, units=Shard(range(mla.cached_dim)))
        self.widths = [len(queries.shard(parallel)), mla.cached_dim]
        self.first = ColumnLinear(weights, (queries, latent), config.hidden_size, parallel, config.attention_bias)

    def split_projection(self, projected_TO: Tensor) -> tuple[Tensor, Tensor]:
        """From the first GEMM: queries ``[T, H E]``, and ``[T, C]`` to be cached, both before norm and rope."""
        queries, cached_TC = torch.split(projected_TO, self.widths, dim=1)
        return queries, cached_TC


class LowRankQueries:
    """Queries through a low-rank projection (``q_lora_rank``), in one GEMM with the cached latent."""

    def __init__(self, config: ModelConfig, mla: MlaConfig, rank: int, weights: Weights, parallel: Parallel) -> None:
        """Read ``q_a_proj``, ``q_a_layernorm``, ``q_b_proj`` and ``kv_a_proj_with_mqa``; ``rank`` is Q."""
        self.widths = [rank, mla.cached_dim]
        both = (Projection("q_a_proj", rank), Projection("kv_a_proj_with_mqa", mla.cached_dim))
        self.first = ColumnLinear(weights, both, config.hidden_size, _WHOLE, config.attention_bias)
        self.norm = RmsNorm(weights, "q_a_layernorm", rank, _LATENT_EPS)
        queries = Projection("q_b_proj", config.num_heads, mla.query_dim)
        self.queries = ColumnLinear(weights, (queries,), rank, parallel)

    def split_projection(self, projected_TO: Tensor) -> tuple[Tensor, Tensor]:
        """As ``DirectQueries.split_projection``."""
        query_TQ, latent_TC = torch.split(projected_TO, self.widths, dim=1)
        return self.queries(self.norm(query_TQ)), latent_TC


class _Raw(NamedTuple):
    """A step's projections before norm and rope, and the rope tables."""

    q_THE: Tensor
    cached_TC: Tensor
    tables: Tables

    def reorder(self, order_T: Tensor) -> _Raw:
        """The tokens in another order."""
        tables = (table.index_select(0, order_T) for table in self.tables)
        return _Raw(self.q_THE.index_select(0, order_T), self.cached_TC.index_select(0, order_T), Tables(*tables))


class MlaAttention:
    """MLA: all heads' keys and values come from one latent a token; the cache holds it and one shared key for rope."""

    def __init__(self, config: ModelConfig, mla: MlaConfig, weights: Weights, parallel: Parallel) -> None:
        """Read the query and latent projections, ``kv_a_layernorm``, ``kv_b_proj`` and ``o_proj``."""
        self.mla = mla
        self.inputs = (
            DirectQueries(config, mla, weights, parallel)
            if mla.q_rank is None
            else LowRankQueries(config, mla, mla.q_rank, weights, parallel)
        )
        norm_L = weights.take("kv_a_layernorm.weight", (mla.latent_dim,))
        self._norm = MlaNorm(norm_L, _LATENT_EPS)
        up = Projection("kv_b_proj", config.num_heads, mla.nope_dim + mla.value_dim)
        up_weight = up.take(weights, "kv_b_proj.weight", (up.num_outputs, mla.latent_dim), parallel)
        self._expand = kv_up_projection(up_weight.unflatten(0, (-1, up.unit_size)), mla)
        weights.hold_more("kv_b_proj.weight", self._expand.num_more_bytes)
        self.key_HOL, self.value_HVL = self._expand.key_HOL, self._expand.value_HVL
        values = Projection("o_proj", config.num_heads, mla.value_dim)
        self.output = RowLinear(weights, "o_proj", values, config.hidden_size, parallel, config.attention_bias)

    def __call__(self, x_TD: Tensor, step: Step[MlaStep], pages: Tensor) -> Tensor:
        """``[T, D]``."""
        return self.from_projection(self.inputs.first(x_TD), step, pages)

    def from_projection(self, projected_TO: Tensor, step: Step[MlaStep], pages: Tensor) -> Tensor:
        """The same after the first GEMM; only the attention itself treats prefill and decode rows differently."""
        queries, cached_TC = self.inputs.split_projection(projected_TO)
        raw = _Raw(queries.unflatten(1, (-1, self.mla.query_dim)), cached_TC, Tables(step.cos_T1D, step.sin_T1D))
        attend = self._attend if step.attention.num_prefill_tokens else self._attend_absorbed
        if (order_T := step.attention.order_T) is None:
            return self.output(attend(raw, step.attention, pages).flatten(1))
        ordered_THV = attend(raw.reorder(order_T), step.attention, pages)
        return self.output(torch.empty_like(ordered_THV).index_copy_(0, order_T, ordered_THV).flatten(1))

    def _attend_absorbed(self, raw: _Raw, attention: MlaStep, pages: Tensor) -> Tensor:
        """``[T, H, V]`` of a step without prefill tokens."""
        queries, cache = AbsorbedQueries(raw.q_THE, self.key_HOL), _cache_target(attention, pages)
        waits = attention.decode_waits
        q_THC = absorb_and_cache(queries, raw.cached_TC, self._norm, raw.tables, cache, next_waits=waits)
        out_THV = raw.q_THE.new_empty(*raw.q_THE.shape[:2], self.mla.value_dim)
        up_project_values(attention.decode(q_THC, pages), self.value_HVL, out_THV)
        return out_THV

    def _attend(self, raw: _Raw, attention: MlaStep, pages: Tensor) -> Tensor:
        """``[T, H, V]`` of prefill tokens and then decode rows."""
        prefill, decode = slice(attention.num_prefill_tokens), slice(attention.num_prefill_tokens, None)
        cache = _cache_target(attention, pages)
        latent_TC, q_PHE = rope_and_cache(raw.cached_TC, raw.q_THE[prefill], self._norm, raw.tables, cache)
        out_THV = raw.q_THE.new_empty(*raw.q_THE.shape[:2], self.mla.value_dim)
        attention.prefill(q_PHE, latent_TC[prefill], pages, self._expand, out_THV[prefill])
        if attention.num_prefill_tokens < len(out_THV):
            tables = raw.tables.part(decode)
            q_BHC = absorb(raw.q_THE[decode], self.key_HOL, tables, next_waits=attention.decode_waits)
            up_project_values(attention.decode(q_BHC, pages), self.value_HVL, out_THV[decode])
        return out_THV


def _cache_target(attention: MlaStep, pages: Tensor) -> CacheTarget:
    """Where the step's latent rows go in one layer."""
    return CacheTarget(pages, attention.slot_mapping_T, attention.cached_scale)


class MlaBlock(Block[MlaStep]):
    """A block that fuses each norm with the GEMM after it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: MlaAttention,
        mlp: GatedMlp | SparseMlp,
        parallel: Parallel,
    ) -> None:
        """Read the two norms."""
        super().__init__(config, weights, attention, mlp, parallel)
        self.mla_attention = attention
        self.mlp_with_norm = mlp.with_norm

    def __call__(
        self, x_TD: Summand, residual_TD: Tensor, step: Step[MlaStep], pages: Tensor
    ) -> tuple[Summand, Tensor]:
        """See ``Block``."""
        first = self.mla_attention.inputs.first.multiply
        projected_TO, residual_TD = rmsnorm_matmul(x_TD, residual_TD, self.attention_norm, first)
        return self.mlp_with_norm(
            self.mla_attention.from_projection(projected_TO, step, pages), residual_TD, self.mlp_norm
        )


def latent_config(config: ModelConfig) -> MlaConfig:
    """MLA's sizes, which every configuration of these families has."""
    if config.mla is None:
        raise AssertionError(f"{config.architecture} without MLA")
    return config.mla


def read_block(config: ModelConfig, layer: int, weights: Weights, parallel: Parallel) -> Block[MlaStep]:
    """One block from the tensors below ``model.layers.N``."""
    attention = MlaAttention(config, latent_config(config), weights.with_prefix("self_attn"), parallel)
    mlp = _read_mlp(config, layer, weights.with_prefix("mlp"), parallel)
    return MlaBlock(config, weights, attention, mlp, parallel)


def _read_mlp(config: ModelConfig, layer: int, weights: Weights, parallel: Parallel) -> GatedMlp | SparseMlp:
    if config.moe is None or layer in config.moe.dense_layers:
        return GatedMlp(config, weights, parallel)
    return SparseMlp(config, config.moe, weights, parallel)


V2 = FamilySpec(
    family("deepseek_v2"),
    ConfigSpec(head_dim=128, has_mlp_bias=True, read_moe=read_v2_moe, read_mla=read_v2_mla),
    partial(Decoder, read_block=read_block),
)
V3 = FamilySpec(
    family("deepseek_v3"),
    ConfigSpec(head_dim=128, has_mtp_layers=True, read_moe=read_v3_moe, read_mla=read_v3_mla),
    partial(Decoder, read_block=read_block),
)
