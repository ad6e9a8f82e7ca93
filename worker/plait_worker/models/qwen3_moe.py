"""Qwen3-MoE (arXiv 2505.09388): Qwen3's block, whose MLP is a mixture of experts in most layers."""

from __future__ import annotations

from plait_proto import family

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.mlp import GatedMlp, SparseMlp
from plait_worker.model_config import ModelConfig, MoeConfig
from plait_worker.models.block import Block
from plait_worker.models.decoder import mha_model
from plait_worker.models.family import FamilySpec
from plait_worker.models.qwen3 import Qwen3Attention
from plait_worker.parallel import Parallel
from plait_worker.weights.fields import Fields
from plait_worker.weights.gguf_config import GgufSpec
from plait_worker.weights.json_config import MAX_WIDTH, ConfigSpec
from plait_worker.weights.reader import Weights


def read_block(config: ModelConfig, layer: int, weights: Weights, parallel: Parallel) -> Block[StepAttention]:
    """One block from the tensors below ``model.layers.N``."""
    attention = Qwen3Attention(config, weights.with_prefix("self_attn"), parallel)
    mlp = _read_mlp(config, layer, weights.with_prefix("mlp"), parallel)
    return Block(config, weights, attention, mlp, parallel)


def _read_mlp(config: ModelConfig, layer: int, weights: Weights, parallel: Parallel) -> GatedMlp | SparseMlp:
    if config.moe is None or layer in config.moe.dense_layers:
        return GatedMlp(config, weights, parallel)
    return SparseMlp(config, config.moe, weights, parallel)


def read_moe(fields: Fields, num_layers: int) -> MoeConfig:
    """The mixture of experts, and which layers do without."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    every = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.integers("mlp_only_layers"))
    return MoeConfig(
        num_experts=fields.integer(name, high=MAX_WIDTH),
        num_experts_per_token=fields.integer("num_experts_per_tok", high=MAX_WIDTH),
        intermediate_size=fields.integer("moe_intermediate_size", high=MAX_WIDTH),
        normalise_top_k=fields.boolean("norm_topk_prob", False),
        dense_layers=frozenset(n for n in range(num_layers) if n in dense or (n + 1) % every),
    )


FAMILY = FamilySpec(
    family("qwen3_moe"), ConfigSpec(head_dim=128, read_moe=read_moe), mha_model(read_block), GgufSpec(has_experts=True)
)
