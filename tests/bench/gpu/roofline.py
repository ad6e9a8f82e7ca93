"""The roofline of a model on a machine: operations over its GEMM rate, bytes over its copy bandwidth.

Prefill computes; a decode step reads the weights or multiplies by them, whichever takes longer, and reads the cache.
Both are added, since neither hides the other on one stream. Weights are bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BYTES = 2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a GPU sustains."""

    gemm: float
    """FLOP/s of a large GEMM."""
    copy: float
    """Bytes/s read and written."""


NOMINAL = Ceilings(765e12, 4.24e12)
"""The goals were set with these."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token takes; counts are elements of the weights."""

    always: float
    """Read and used for every token; embeddings, of which a row is read, and the head do not count."""
    head: float
    experts: float
    """Of all routed experts."""
    chosen_share: float
    """Of the experts that a token takes."""
    cached_bytes: float
    """Of one token of context."""
    pair_flops: float
    """Of one query and one key of prefill, over all layers."""

    @property
    def used(self) -> float:
        """Elements that a prompt's token is multiplied by."""
        return self.always + self.experts * self.chosen_share

    def step_bytes(self, num_rows: int) -> float:
        """Weights that a decode step reads: of the experts those that are expected to be chosen."""
        read = self.experts * (1 - (1 - self.chosen_share) ** num_rows)
        return _BYTES * (self.always + read + self.head)


def model_cost(config: dict[str, Any]) -> ModelCost:
    """From a model's configuration."""
    return _mla_cost(config) if "kv_lora_rank" in config else _mha_cost(config)


def _mha_cost(config: dict[str, Any]) -> ModelCost:
    hidden, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    block = hidden * dim * 2 * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
    return ModelCost(
        always=layers * block,
        head=hidden * config["vocab_size"],
        experts=0,
        chosen_share=0,
        cached_bytes=_BYTES * 2 * kv_heads * dim * layers,
        pair_flops=4 * heads * dim * layers,
    )


def _mla_cost(config: dict[str, Any]) -> ModelCost:
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    latent, rope, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    nope, first_dense = config["qk_nope_head_dim"], config["first_k_dense_replace"]
    attention = hidden * (heads * (nope + rope) + latent + rope) + latent * heads * (nope + value)
    attention += heads * value * hidden
    expert, sparse = 3 * hidden * config["moe_intermediate_size"], layers - first_dense
    dense = first_dense * 3 * hidden * config["intermediate_size"]
    return ModelCost(
        always=layers * attention + dense + sparse * expert * config["n_shared_experts"],
        head=hidden * config["vocab_size"],
        experts=sparse * expert * config["n_routed_experts"],
        chosen_share=config["num_experts_per_tok"] / config["n_routed_experts"],
        cached_bytes=_BYTES * (latent + rope) * layers,
        pair_flops=2 * heads * (nope + rope + value) * layers,
    )


def most_tokens_per_second(
    cost: ModelCost, num_streams: int, input_len: int, output_len: int, ceilings: Ceilings
) -> float:
    """Output tokens a second of a closed loop, at most."""
    prefill_flops = input_len * 2 * cost.used + input_len**2 / 2 * cost.pair_flops
    gemm_seconds = 2 * (cost.used + cost.head) * num_streams / ceilings.gemm
    cached = num_streams * (input_len + output_len / 2) * cost.cached_bytes / ceilings.copy
    step = max(cost.step_bytes(num_streams) / ceilings.copy, gemm_seconds) + cached
    return num_streams * output_len / (num_streams * prefill_flops / ceilings.gemm + output_len * step)
