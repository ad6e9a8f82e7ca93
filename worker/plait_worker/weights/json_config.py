"""``config.json`` of a Hugging Face folder, read as data: pointers to code (``auto_map``) are never followed."""

from __future__ import annotations

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig, MoeConfig
from plait_worker.weights.block_fp8 import read_block_size
from plait_worker.weights.deepseek_config import V2, V3, read_deepseek_moe, read_mla
from plait_worker.weights.fields import Fields
from plait_worker.weights.minimax_config import M2, read_minimax_moe
from plait_worker.weights.rope_config import read_rope, read_rotary_dim

_MLA = (V2, V3)
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *_MLA, M2)
"""The families that can be served."""
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20


def read_config(fields: Fields) -> ModelConfig:
    """The architecture that ``config.json`` describes.

    Raises ``ModelFilesError`` for an architecture, activation, rope type, quantisation or attention
    pattern that is not supported.
    """
    architecture = read_architecture(fields)
    _check_supported(fields)
    num_heads = fields.integer("num_attention_heads", high=MAX_WIDTH)
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = _read_head_dim(fields, architecture, hidden_size, num_heads)
    rope, max_positions = read_rope(fields, read_rotary_dim(fields, head_dim) if architecture == M2 else None)
    mla = read_mla(fields, architecture, rope) if architecture in _MLA else None
    return checked(
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
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False) if architecture in ("LlamaForCausalLM", V2) else False,
            moe=_read_moe(fields, architecture, num_layers),
            mla=mla,
            num_mtp_layers=fields.integer("num_nextn_predict_layers", 0, 0, MAX_LAYERS) if architecture == V3 else 0,
        ),
        fields.where,
    )


def read_architecture(fields: Fields) -> str:
    """The family's name; raises ``ModelFilesError`` for one that is not supported."""
    named = fields.texts("architectures")
    if not named:
        raise ModelFilesError(f"{fields.where} names no architecture: the file is incomplete or of another kind")
    if named[0] not in ARCHITECTURES:
        raise ModelFilesError(
            f"{fields.where}: architecture {named[0]} is not supported; these are: {', '.join(ARCHITECTURES)}"
        )
    return named[0]


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """The configuration; raises ``ModelFilesError`` where its numbers do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFilesError(
            f"{where}: {config.num_heads} query heads cannot share {config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFilesError(f"{where}: head_dim is {config.head_dim}, but rope needs an even one")
    if config.moe and config.moe.num_experts_per_token > config.moe.num_experts:
        raise ModelFilesError(
            f"{where}: {config.moe.num_experts_per_token} experts a token, but there are {config.moe.num_experts}"
        )
    return config


def _read_head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    """The stated one; Qwen3's default does not follow from the hidden size."""
    follows = architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM")
    default = max(1, hidden_size // num_heads) if follows else 128
    return fields.integer("head_dim", default)


def _check_supported(fields: Fields) -> None:
    """Raise for what would be computed wrongly if it were passed over."""
    read_block_size(fields)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelFilesError(f"{fields.where}: hidden_act {activation} is not supported; only silu is")
    # As transformers takes it: a window that is not stated has a default width, and one that is null is none.
    if fields.flag("use_sliding_window", False) and fields.values.get("sliding_window", 0) is not None:
        raise ModelFilesError(f"{fields.where}: sliding-window attention (use_sliding_window) is not supported")
    patterns = sorted(set(fields.texts("layer_types")) - {"full_attention"})
    if patterns:
        raise ModelFilesError(
            f"{fields.where}: layer_types {', '.join(patterns)} is not supported; only full_attention is"
        )


def _read_moe(fields: Fields, architecture: str, num_layers: int) -> MoeConfig | None:
    """The mixture of experts; None in a dense model."""
    if architecture in _MLA:
        return read_deepseek_moe(fields, architecture, num_layers)
    if architecture == M2:
        return read_minimax_moe(fields)
    return _read_qwen_moe(fields, num_layers) if architecture == "Qwen3MoeForCausalLM" else None


def _read_qwen_moe(fields: Fields, num_layers: int) -> MoeConfig:
    """The mixture of experts, and which layers do without."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    every = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.integers("mlp_only_layers"))
    return MoeConfig(
        num_experts=fields.integer(name, high=MAX_WIDTH),
        num_experts_per_token=fields.integer("num_experts_per_tok", high=MAX_WIDTH),
        intermediate_size=fields.integer("moe_intermediate_size", high=MAX_WIDTH),
        normalise_top_k=fields.flag("norm_topk_prob", False),
        dense_layers=frozenset(n for n in range(num_layers) if n in dense or (n + 1) % every),
    )
