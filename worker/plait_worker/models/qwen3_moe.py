"""Qwen3-MoE (arXiv 2505.09388): Qwen3's block, whose MLP is a mixture of experts in most layers."""

from __future__ import annotations

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.mlp import GatedMlp, SparseMlp
from plait_worker.model_config import ModelConfig
from plait_worker.models.decoder import Block
from plait_worker.models.qwen3 import Qwen3Attention
from plait_worker.parallel import Parallel
from plait_worker.weights.reader import Weights


def read_block(config: ModelConfig, layer: int, weights: Weights, parallel: Parallel) -> Block[StepAttention]:
    """One block from the tensors below ``model.layers.N``."""
    attention = Qwen3Attention(config, weights.at("self_attn"), parallel)
    return Block(config, weights, attention, _read_mlp(config, layer, weights.at("mlp"), parallel))


def _read_mlp(config: ModelConfig, layer: int, weights: Weights, parallel: Parallel) -> GatedMlp | SparseMlp:
    if config.moe is None or layer in config.moe.dense_layers:
        return GatedMlp(config, weights, parallel)
    return SparseMlp(config, config.moe, weights, parallel)
