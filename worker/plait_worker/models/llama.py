"""Llama (arXiv 2302.13971, 2407.21783): grouped-query attention with rope, gated MLP, pre-norm.

Shapes: T tokens, D the hidden size, H query heads and G key-value heads of this rank, E a head's width.
"""

from __future__ import annotations

import torch
from plait_kernels.rope import rotate_heads
from plait_proto import family
from torch import Tensor

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.gqa import GqaAttention
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.mlp import GatedMlp
from plait_worker.model_config import ModelConfig
from plait_worker.models.block import Block, MhaStep
from plait_worker.models.decoder import mha_model
from plait_worker.models.family import FamilySpec
from plait_worker.parallel import Parallel
from plait_worker.weights.formats.read import A16
from plait_worker.weights.gguf_config import GgufSpec
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.reader import Weights


class LlamaAttention(GqaAttention):
    """Query, key and value in one matrix; query and key rotated by position."""

    def __init__(
        self, config: ModelConfig, weights: Weights, parallel: Parallel, qkv_bias: bool, output_bias: bool
    ) -> None:
        """Read ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``."""
        heads, kv_heads = parallel.shard_heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = len(heads), len(kv_heads), config.head_dim
        q = Projection("q_proj", config.num_heads, config.head_dim, heads)
        k = Projection("k_proj", config.num_kv_heads, config.head_dim, kv_heads)
        v = Projection("v_proj", config.num_kv_heads, config.head_dim, kv_heads)
        self.qkv = ColumnLinear(weights, (q, k, v), config.hidden_size, parallel, qkv_bias, A16)
        self.output = RowLinear(weights, "o_proj", q, config.hidden_size, parallel, output_bias)

    def __call__(self, x_TD: Tensor, step: MhaStep, pages: Tensor) -> Tensor:
        """``[T, D]``."""
        qkv_THE = self.qkv(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        qk_THE, v_TGE = torch.split(qkv_THE, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q_THE, k_TGE = rotate_heads(qk_THE, self.num_heads, step.cos_T1D, step.sin_T1D)
        out_THE = step.attention.forward(q_THE, k_TGE, v_TGE, pages, step.scales)
        return self.output(out_THE.flatten(1))


def read_block(config: ModelConfig, _layer: int, weights: Weights, parallel: Parallel) -> Block[StepAttention]:
    """One block from the tensors below ``model.layers.N``."""
    bias = config.attention_bias
    attention = LlamaAttention(config, weights.with_prefix("self_attn"), parallel, qkv_bias=bias, output_bias=bias)
    mlp = GatedMlp(config, weights.with_prefix("mlp"), parallel)
    return Block(config, weights, attention, mlp, parallel)


FAMILY = FamilySpec(family("llama"), ConfigSpec(has_mlp_bias=True), mha_model(read_block), GgufSpec(is_permuted=True))
