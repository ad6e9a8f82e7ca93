"""A model's architecture, whatever file it was read from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from plait_kernels.moe import GroupLimit
from plait_proto import LayerKind, family_of
from plait_proto.divided_model import DividedModel

_FULL = LayerKind(attention="mha", cache="full")


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: low frequencies are divided by ``factor``, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): a ramp between interpolated and kept frequencies."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ramp's ends are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """What cosine and sine are multiplied by."""
    score_temperature: float = 1.0
    """Factor of MLA's queries and keys: its scores are multiplied by the square."""


@dataclass(frozen=True, slots=True)
class FactorsRope:
    """Each frequency is divided by a factor of its own (``rope_freqs.weight`` of a GGUF)."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorsRope


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864)."""

    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """How the frequencies are changed for a longer context."""
    rotary_dim: int | None = None
    """Elements of a head that rope rotates, the first in the files' order; None for all."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    q_rank: int | None
    """Width of the queries' latent (``q_lora_rank``); None for a direct projection."""
    latent_dim: int
    """Width of the latent that keys and values are made from (``kv_lora_rank``)."""
    nope_dim: int
    """Elements of a head's query and key without rope."""
    rope_dim: int
    """Elements of a head's query with rope, and of the one key that all heads share."""
    value_dim: int
    """Elements of a head's value."""
    scale: float
    """Factor of the scores before the softmax, YaRN's squared temperature included."""
    is_interleaved: bool
    """Whether rope rotates neighbours in the files' order, not halves."""

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Elements cached of a token: the latent, then the shared key."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class GroupRouting:
    """Expert choice of DeepSeek's and MiniMax's routers."""

    scoring: Literal["softmax", "sigmoid"]
    """Softmax in V2; sigmoid with a correction bias in V3 and MiniMax."""
    limit: GroupLimit
    scale: float
    """Factor of the chosen experts' weights."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts; every expert is a gated MLP."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    normalise_top_k: bool
    """Whether the chosen experts' probabilities are divided by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with a dense MLP instead."""
    shared_size: int = 0
    """Width of the shared MLP, which serves every token; 0 for none."""
    groups: GroupRouting | None = None
    """None for a softmax over all experts, and in DeepSeek-V4."""
    scale: float = 1.0
    """Factor of the chosen experts' weights in DeepSeek-V4."""
    hash_layers: frozenset[int] = frozenset()
    """Layers whose experts are chosen by the token's id."""
    limit: float | None = None
    """Bound of an expert's gate (from above) and up-projection (both ways) before they are multiplied."""


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """DeepSeek-V4's attention: recent keys as they are, and one entry for every so many tokens before them."""

    ratios: tuple[int, ...]
    """Tokens of an entry in each layer; 0 for a dense layer, which sees the window alone."""
    sparse_ratio: int
    """The ratio of the layers whose entries overlap and are chosen by an indexer (CSA)."""
    window: int
    """Recent tokens that are seen as they are, the query's own included."""
    q_rank: int
    """Width of the queries' latent."""
    rope_dim: int
    """Elements of a head that rope rotates, the last ones, in adjacent pairs."""
    entry_rope: RopeConfig
    """Of layers with entries; ``ModelConfig.rope`` is the dense layers'."""
    num_groups: int
    """Groups of heads that the output projection's first half keeps apart."""
    group_rank: int
    """Width of a group's output."""
    num_index_heads: int
    index_dim: int
    """Elements of an indexer's head."""
    top_k: int
    """Entries that an indexer chooses."""

    @property
    def page_multiple(self) -> int:
        """What a page's tokens must be a multiple of, so that it holds whole entries of every layer."""
        return math.lcm(*(ratio for ratio in self.ratios if ratio))


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """Manifold-constrained hyper-connections (mHC): residual streams that each part of a block mixes."""

    num_streams: int
    num_iterations: int
    """Of Sinkhorn's normalisation."""
    eps: float


@dataclass(frozen=True, slots=True)
class ModelConfig:  # budget: the sum of what the families' files state
    """What the model files say; sizes are of the whole model, not of a rank."""

    architecture: str
    """Name of the family as Hugging Face writes it, ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of a head; in MLA those with rope."""
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    """Tokens of the longest request the model was trained for."""
    tie_embeddings: bool
    """Whether the output head is the embedding."""
    attention_bias: bool = False
    """Whether the attention's projections have biases."""
    mlp_bias: bool = False
    """Whether the dense MLP's projections have biases."""
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    """None for MHA and GQA."""
    compressed: CompressedConfig | None = None
    """DeepSeek-V4's attention; None for the others."""
    streams: StreamsConfig | None = None
    """DeepSeek-V4's residual streams; None for one."""
    sliding_window: int | None = None
    """Positions that a token sees, itself included, in layers with a sliding window; None for all."""
    num_mtp_layers: int = 0
    """Multi-token-prediction layers in the files, after the last (arXiv 2412.19437, section 2.2); not loaded."""

    @property
    def layer_kinds(self) -> list[LayerKind]:
        """How each layer attends and what it caches, as its family and the files say."""
        family = family_of(self.architecture)
        if family is None:
            raise AssertionError(f"{self.architecture} is of no family")
        kinds = family.kinds(self.num_layers)
        if self.sliding_window is not None:
            return kinds
        return [_FULL if kind.cache == "sliding_window" else kind for kind in kinds]

    @property
    def divided(self) -> DividedModel:
        """What ranks divide."""
        moe = self.moe
        return DividedModel(
            architecture=self.architecture,
            num_heads=self.num_heads,
            has_mla=self.mla is not None,
            num_output_groups=self.compressed.num_groups if self.compressed is not None else None,
            mlp_width=self.intermediate_size if moe is None or moe.dense_layers else None,
            num_experts=moe.num_experts if moe is not None else 0,
            expert_width=moe.intermediate_size if moe is not None else 0,
            has_shared_experts=moe is not None and moe.shared_size > 0,
        )

    def without_unused_window(self, max_model_len: int | None) -> ModelConfig:
        """Without its sliding window if no request of ``max_model_len`` tokens outgrows it; None is any length."""
        if max_model_len is None or self.sliding_window is None or self.sliding_window < max_model_len:
            return self
        return replace(self, sliding_window=None)
