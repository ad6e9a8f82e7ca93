"""A GGUF's metadata as a ``ModelConfig``."""

from __future__ import annotations

from dataclasses import dataclass

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import FactorsRope, LinearRope, ModelConfig, MoeConfig, RopeConfig, RopeScaling, YarnRope
from plait_worker.weights.fields import Fields
from plait_worker.weights.gguf_header import GgufHeader
from plait_worker.weights.json_config import MAX_LAYERS, MAX_WIDTH, check_config
from plait_worker.weights.rope_config import DEFAULT_THETA, LEAST_THETA, yarn_temperature

ROPE_TYPES = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class GgufSpec:
    """How a family's GGUF files differ from the others'."""

    is_permuted: bool = False
    """Whether the rows of queries and keys are stored in the order of rope on neighbours."""
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """What a GGUF states of its model."""

    header: GgufHeader
    rope_factors: tuple[float, ...] | None
    """The tensor ``rope_freqs.weight``."""
    where: str
    """The file, in messages."""

    @property
    def architecture(self) -> str:
        """GGUF's name of the family; raises ``ModelFilesError`` if there is none."""
        return Fields(self.header.fields, self.where).text("general.architecture")


def read_config(metadata: GgufMetadata, architecture: str, spec: GgufSpec) -> ModelConfig:
    """The model that the metadata describes; ``architecture`` is Hugging Face's name of its family.

    Raises ``ModelFilesError`` for a rope type or variant that is not supported.
    """
    header, kind, where = metadata.header, metadata.architecture, metadata.where
    fields = _of_family(header, kind, where)
    _check_supported(header, fields, kind, spec)
    num_heads = fields.integer("attention.head_count", high=MAX_WIDTH)
    hidden_size = fields.integer("embedding_length", high=MAX_WIDTH)
    head_dim = _read_head_dim(fields, hidden_size, num_heads)
    rope, max_positions = _read_rope(fields, metadata.rope_factors, head_dim)
    return check_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=_vocab_size(header, where),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length", 1 if spec.has_experts else None, high=MAX_WIDTH),
            num_layers=fields.integer("block_count", high=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads, high=MAX_WIDTH),
            head_dim=head_dim,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
            rope=rope,
            max_positions=max_positions,
            tie_embeddings="output.weight" not in header.tensors,
            attention_bias="blk.0.attn_q.bias" in header.tensors,
            mlp_bias=False,
            moe=_read_moe(fields) if spec.has_experts else None,
        ),
        where,
    )


def _of_family(header: GgufHeader, kind: str, where: str) -> Fields:
    """The fields under the family's prefix, without it."""
    prefix = f"{kind}."
    return Fields({k.removeprefix(prefix): v for k, v in header.fields.items() if k.startswith(prefix)}, where)


def _check_supported(header: GgufHeader, fields: Fields, kind: str, spec: GgufSpec) -> None:
    """Raise for what would be computed wrongly if it were ignored."""
    if Fields(header.fields, fields.where).integer("split.count", 0, low=0) > 1:
        raise ModelFilesError(
            f"{fields.where} is one part of a split GGUF: merge the parts first (llama-gguf-split --merge)"
        )
    if not spec.has_experts and fields.integer("expert_count", 0, low=0):
        raise ModelFilesError(f"{fields.where}: {kind} with experts (as in Mixtral) is not supported")
    if fields.has("attention.sliding_window"):
        raise ModelFilesError(f"{fields.where}: sliding-window attention is not supported")
    per_layer = [
        key
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
        if f"{kind}.{key}" in header.arrays
    ]
    if per_layer:
        raise ModelFilesError(f"{fields.where}: {per_layer[0]} differs from layer to layer, which is not supported")


def _read_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """The stated head dimension of keys, values and rope, or the one that follows from the sizes."""
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads), high=MAX_WIDTH)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (stated := fields.integer(name, head_dim)) != head_dim:
            raise ModelFilesError(
                f"{fields.where}: {name} is {stated}, not the head dimension of the keys, {head_dim}, "
                "which is not supported"
            )
    return head_dim


def _vocab_size(header: GgufHeader, where: str) -> int:
    if "token_embd.weight" not in header.tensors:
        raise ModelFilesError(f"{where} lacks the tensor token_embd.weight: it holds no language model")
    return header.tensors["token_embd.weight"].shape[0]


def _read_rope(fields: Fields, factors: tuple[float, ...] | None, head_dim: int) -> tuple[RopeConfig, int]:
    """The embedding, and the longest context that it was made for."""
    max_positions = fields.integer("context_length")
    scaling = _read_scaling(fields, max_positions)
    if factors is not None:
        if scaling is not None:
            raise ModelFilesError(f"{fields.where}: rope_freqs.weight beside another scaling of rope is not supported")
        if len(factors) != head_dim // 2:
            raise ModelFilesError(
                f"{fields.where}: rope_freqs.weight holds {len(factors)} factors, but a head_dim of {head_dim} has "
                f"{head_dim // 2} frequencies: the file's parts do not belong together"
            )
        scaling = FactorsRope(factors)
    if isinstance(scaling, YarnRope):
        max_positions = max(max_positions, int(scaling.original_max_positions * scaling.factor))
    return RopeConfig(fields.number("rope.freq_base", DEFAULT_THETA, LEAST_THETA), scaling), max_positions


def _read_scaling(fields: Fields, max_positions: int) -> RopeScaling | None:
    """As in llama.cpp: the default type is linear, and without a factor nothing is scaled."""
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ROPE_TYPES:
        raise ModelFilesError(f"{fields.where}: rope type {kind} is not supported; these are: {', '.join(ROPE_TYPES)}")
    if kind == "none":
        return None
    factor = _read_factor(fields)
    if kind == "linear":
        return None if factor == 1.0 else LinearRope(factor)
    return YarnRope(
        factor=factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length", max_positions),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_temperature(factor) * fields.number("rope.scaling.yarn_attn_factor", 1.0),
    )


def _read_factor(fields: Fields) -> float:
    """Rope's scaling factor, under its current or its old name; 1 if both are absent or 0."""
    name = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    return fields.number(name, 1.0) if fields.values.get(name) else 1.0


def _read_moe(fields: Fields) -> MoeConfig:
    """GGUF's Qwen3-MoE normalises the experts' weights by default."""
    return MoeConfig(
        num_experts=fields.integer("expert_count", high=MAX_WIDTH),
        num_experts_per_token=fields.integer("expert_used_count", high=MAX_WIDTH),
        intermediate_size=fields.integer("expert_feed_forward_length", high=MAX_WIDTH),
        normalise_top_k=fields.boolean("expert_weights_norm", True),
    )
