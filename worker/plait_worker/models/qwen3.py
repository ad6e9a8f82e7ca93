"""Qwen3 (arXiv 2505.09388): Llama's block, with each head of query and key normalised before rope.

Shapes: T tokens, D the hidden size, H query heads and G key-value heads of this rank, E a head's width.
"""

from __future__ import annotations

import torch
from plait_kernels.rope import HeadNorm, rotate_heads
from plait_proto import family
from torch import Tensor

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.gqa import GqaAttention
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.mlp import GatedMlp
from plait_worker.layers.norm import RmsNorm
from plait_worker.model_config import ModelConfig
from plait_worker.models.block import Block, MhaStep
from plait_worker.models.decoder import mha_model
from plait_worker.models.family import FamilySpec
from plait_worker.parallel import Parallel
from plait_worker.weights.formats.read import A16
from plait_worker.weights.gguf_config import GgufSpec
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.reader import Weights


class Qwen3Attention(GqaAttention):
    """Query, key and value in one matrix; query and key normalised head by head, then rotated."""

    q_norm: RmsNorm
    k_norm: RmsNorm

    def __init__(self, config: ModelConfig, weights: Weights, parallel: Parallel) -> None:
        """Read ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``q_norm`` and ``k_norm``."""
        heads, kv_heads = parallel.shard_heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = len(heads), len(kv_heads), config.head_dim
        q = Projection("q_proj", config.num_heads, config.head_dim, heads)
        k = Projection("k_proj", config.num_kv_heads, config.head_dim, kv_heads)
        v = Projection("v_proj", config.num_kv_heads, config.head_dim, kv_heads)
        self.qkv = ColumnLinear(weights, (q, k, v), config.hidden_size, parallel, config.attention_bias, A16)
        self.output = RowLinear(weights, "o_proj", q, config.hidden_size, parallel, config.attention_bias)
        self.q_norm = RmsNorm(weights, "q_norm", config.head_dim, config.norm_eps)
        self.k_norm = RmsNorm(weights, "k_norm", config.head_dim, config.norm_eps)
        self.norm = HeadNorm(self.q_norm.weight_D, self.k_norm.weight_D, config.norm_eps)

    def __call__(self, x_TD: Tensor, step: MhaStep, pages: Tensor) -> Tensor:
        """``[T, D]``."""
        qkv_THE = self.qkv(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        qk_THE, v_TGE = torch.split(qkv_THE, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q_THE, k_TGE = rotate_heads(qk_THE, self.num_heads, step.cos_T1D, step.sin_T1D, self.norm)
        out_THE = step.attention.forward(q_THE, k_TGE, v_TGE, pages, step.scales)
        return self.output(out_THE.flatten(1))


def read_block(config: ModelConfig, _layer: int, weights: Weights, parallel: Parallel) -> Block[StepAttention]:
    """One block from the tensors below ``model.layers.N``."""
    attention = Qwen3Attention(config, weights.with_prefix("self_attn"), parallel)
    mlp = GatedMlp(config, weights.with_prefix("mlp"), parallel)
    return Block(config, weights, attention, mlp, parallel)


FAMILY = FamilySpec(family("qwen3"), ConfigSpec(head_dim=128), mha_model(read_block), GgufSpec())
