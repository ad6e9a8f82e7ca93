"""``config.json`` of a Hugging Face folder, read as data: pointers to code (``auto_map``) are never followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from plait_worker.weights.fields import Fields
from plait_worker.weights.quantisation_config import read_quantisation
from plait_worker.weights.rope_config import read_rope, read_rotary_dim

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20


def _dense(_fields: Fields, _num_layers: int) -> None:
    """The experts of a family without any."""


@dataclass(frozen=True, slots=True)
class ConfigSpec:
    """How a family's ``config.json`` differs from the others'."""

    head_dim: int | None = None
    """What an absent ``head_dim`` means; None: it follows from the hidden size."""
    has_mlp_bias: bool = False
    """Whether ``mlp_bias`` is read."""
    has_partial_rope: bool = False
    """Whether rope may rotate a part of each head."""
    default_window: int | None = None
    """What an absent ``sliding_window`` means, null being none; None for a family without a window."""
    has_mtp_layers: bool = False
    """Whether ``num_nextn_predict_layers`` is read."""
    read_moe: Callable[[Fields, int], MoeConfig | None] = _dense
    """The experts, from the fields and the number of layers; None for a dense model."""
    read_mla: Callable[[Fields, RopeConfig], MlaConfig] | None = None
    """The sizes of MLA; None for a family without it."""
    read_whole: Callable[[Fields, str], ModelConfig] | None = None
    """Reads everything, from the fields and the architecture, for a family with little in common with the others."""


def read_config(fields: Fields, architecture: str, spec: ConfigSpec) -> ModelConfig:
    """The model that ``config.json`` describes.

    Raises ``ModelFilesError`` for an activation, rope type, quantisation or attention pattern that is not supported.
    """
    if spec.read_whole is not None:
        return spec.read_whole(fields, architecture)
    _check_supported(fields, spec)
    num_heads = fields.integer("num_attention_heads", high=MAX_WIDTH)
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = fields.integer("head_dim", spec.head_dim or max(1, hidden_size // num_heads))
    rope, max_positions = read_rope(fields, read_rotary_dim(fields, head_dim) if spec.has_partial_rope else None)
    mla = spec.read_mla(fields, rope) if spec.read_mla else None
    return check_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", high=MAX_WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if mla else fields.integer("num_key_value_heads", num_heads, high=MAX_WIDTH),
            head_dim=mla.rope_dim if mla else head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
            rope=rope,
            max_positions=max_positions,
            tie_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False) if spec.has_mlp_bias else False,
            moe=spec.read_moe(fields, num_layers),
            mla=mla,
            sliding_window=_read_window(fields, spec),
            num_mtp_layers=fields.integer("num_nextn_predict_layers", 0, 0, MAX_LAYERS) if spec.has_mtp_layers else 0,
        ),
        fields.where,
    )


def read_architecture(fields: Fields) -> str:
    """What the file calls the family; raises ``ModelFilesError`` if it names none."""
    named = fields.texts("architectures")
    if not named:
        raise ModelFilesError(f"{fields.where} names no architecture: the file is incomplete or of another kind")
    return named[0]


def check_config(config: ModelConfig, where: str) -> ModelConfig:
    """The configuration; raises ``ModelFilesError`` if its sizes contradict each other."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFilesError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} key-value heads evenly: "
            "correct the file, or download it again"
        )
    if config.head_dim % 2:
        raise ModelFilesError(
            f"{where}: head_dim is {config.head_dim}, but rope needs an even one: correct it, or download it again"
        )
    if config.moe and config.moe.num_experts_per_token > config.moe.num_experts:
        raise ModelFilesError(
            f"{where}: {config.moe.num_experts_per_token} experts a token, but there are "
            f"{config.moe.num_experts}: correct the file, or download it again"
        )
    return config


def _read_window(fields: Fields, spec: ConfigSpec) -> int | None:
    is_null = "sliding_window" in fields.values and not fields.has("sliding_window")
    return None if spec.default_window is None or is_null else fields.integer("sliding_window", spec.default_window)


def _check_supported(fields: Fields, spec: ConfigSpec) -> None:
    """Raise for what would be computed wrongly if it were ignored."""
    read_quantisation(fields)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelFilesError(f"{fields.where}: hidden_act {activation} is not supported; only silu is")
    # As in transformers: an absent window has a default size, and null means none.
    if fields.boolean("use_sliding_window", False) and fields.values.get("sliding_window", 0) is not None:
        raise ModelFilesError(f"{fields.where}: sliding-window attention (use_sliding_window) is not supported")
    supported = "full_attention" if spec.default_window is None else "sliding_attention"
    patterns = sorted(set(fields.texts("layer_types")) - {supported})
    if patterns:
        raise ModelFilesError(
            f"{fields.where}: layer_types {', '.join(patterns)} is not supported; only {supported} is"
        )
