"""MiniMax-M2 (arXiv 2510.26697): norms over all heads of queries and of keys, partial rope, experts in every layer.

Shapes: T tokens, D the hidden size, H query heads and G key-value heads of this rank, E a head's width.
"""

from __future__ import annotations

import torch
from plait_kernels.rope import rotate_heads
from plait_proto import family
from torch import Tensor

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.mlp import MoeNames, SparseMlp
from plait_worker.layers.norm import ProjectionNorm
from plait_worker.model_config import ModelConfig
from plait_worker.models.block import Block, MhaStep
from plait_worker.models.decoder import mha_model
from plait_worker.models.family import FamilySpec
from plait_worker.parallel import Parallel
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.minimax_config import read_minimax_moe
from plait_worker.weights.reader import Weights

NAMES = MoeNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


class MiniMaxAttention:
    """Query, key and value in one matrix; one norm over all queries of a token, and one over all its keys."""

    def __init__(self, config: ModelConfig, weights: Weights, parallel: Parallel) -> None:
        """Read ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``q_norm`` and ``k_norm``."""
        heads, kv_heads = parallel.shard_heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = len(heads), len(kv_heads), config.head_dim
        q = Projection("q_proj", config.num_heads, config.head_dim, heads)
        k = Projection("k_proj", config.num_kv_heads, config.head_dim, kv_heads)
        v = Projection("v_proj", config.num_kv_heads, config.head_dim, kv_heads)
        self.qkv = ColumnLinear(weights, (q, k, v), config.hidden_size, parallel)
        self.output = RowLinear(weights, "o_proj", q, config.hidden_size, parallel)
        copies = parallel.kv_copies(config.num_heads, config.num_kv_heads)
        self.norm = ProjectionNorm(weights, {"q_norm": q, "k_norm": k}, (1, copies), config.norm_eps, parallel)

    def __call__(self, x_TD: Tensor, step: MhaStep, pages: Tensor) -> Tensor:
        """``[T, D]``."""
        num_qk = self.num_heads + self.num_kv_heads
        qk, v = torch.split(self.qkv(x_TD), [num_qk * self.head_dim, self.num_kv_heads * self.head_dim], dim=1)
        qk_THE, v_TGE = self.norm(qk).unflatten(1, (-1, self.head_dim)), v.unflatten(1, (-1, self.head_dim))
        q_THE, k_TGE = rotate_heads(qk_THE, self.num_heads, step.cos_T1D, step.sin_T1D)
        out_THE = step.attention.forward(q_THE, k_TGE, v_TGE, pages, step.scales)
        return self.output(out_THE.flatten(1))


def read_block(config: ModelConfig, _layer: int, weights: Weights, parallel: Parallel) -> Block[StepAttention]:
    """One block from the tensors below ``model.layers.N``."""
    if config.moe is None:
        raise AssertionError(f"{config.architecture} without experts")
    attention = MiniMaxAttention(config, weights.with_prefix("self_attn"), parallel)
    mlp = SparseMlp(config, config.moe, weights.with_prefix("block_sparse_moe"), parallel, NAMES)
    return Block(config, weights, attention, mlp, parallel)


FAMILY = FamilySpec(
    family("minimax_m2"),
    ConfigSpec(head_dim=128, has_partial_rope=True, read_moe=read_minimax_moe),
    mha_model(read_block),
)
