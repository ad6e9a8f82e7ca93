"""Qwen2 (arXiv 2407.10671): Llama's block, whose query, key and value have biases and whose output has none."""

from __future__ import annotations

from plait_proto import family

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.mlp import GatedMlp
from plait_worker.model_config import ModelConfig
from plait_worker.models.block import Block
from plait_worker.models.decoder import mha_model
from plait_worker.models.family import FamilySpec
from plait_worker.models.llama import LlamaAttention
from plait_worker.parallel import Parallel
from plait_worker.weights.gguf_config import GgufSpec
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.reader import Weights


def read_block(config: ModelConfig, _layer: int, weights: Weights, parallel: Parallel) -> Block[StepAttention]:
    """One block from the tensors below ``model.layers.N``."""
    attention = LlamaAttention(config, weights.with_prefix("self_attn"), parallel, qkv_bias=True, output_bias=False)
    mlp = GatedMlp(config, weights.with_prefix("mlp"), parallel)
    return Block(config, weights, attention, mlp, parallel)


FAMILY = FamilySpec(family("qwen2"), ConfigSpec(), mha_model(read_block), GgufSpec())
