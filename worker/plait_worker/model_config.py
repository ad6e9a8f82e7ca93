"""A model's architecture in numbers, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class ModelConfig:
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
