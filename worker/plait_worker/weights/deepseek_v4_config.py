"""DeepSeek-V4's ``config.json``: as DeepSeek publishes it, and as transformers writes it.

The published form lists ``compress_ratios``, one a layer and one more for each draft layer; transformers' has
``layer_types``, ``compress_rates``, ``mlp_layer_types`` and one rope a kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import CompressedConfig, ModelConfig, MoeConfig, RopeConfig, StreamsConfig, YarnRope
from plait_worker.weights.fields import Fields
from plait_worker.weights.json_config import MAX_LAYERS, MAX_WIDTH
from plait_worker.weights.rope_config import read_rope

DENSE, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""What transformers calls the kinds of layers."""
_RATES = {SPARSE: 4, HEAVY: 128}
_MAX_RATE = 1 << 16
_NUM_HASH_LAYERS = 3
_THETAS = {"main": ("rope_theta", 10000.0), "compress": ("compress_rope_theta", 160000.0)}


def read_deepseek_v4(fields: Fields, architecture: str) -> ModelConfig:
    """The model; raises ``ModelFilesError`` for what is broken or not supported."""
    _check_supported(fields)
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = fields.integer("head_dim", 512, high=MAX_WIDTH)
    rope_dim = _read_rope_dim(fields, head_dim)
    rope, entry_rope = (_read_rope(fields, kind, rope_dim) for kind in _THETAS)
    width = fields.integer("moe_intermediate_size", high=MAX_WIDTH)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size", high=MAX_WIDTH),
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=fields.integer("num_attention_heads", high=MAX_WIDTH),
        num_kv_heads=1,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        rope=rope,
        max_positions=fields.integer("max_position_embeddings", 1 << 20),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        moe=_read_moe(fields, num_layers, width),
        compressed=_read_compressed(fields, num_layers, rope_dim, entry_rope),
        streams=StreamsConfig(
            fields.integer("hc_mult", 4, high=64),
            fields.integer("hc_sinkhorn_iters", 20, high=1000),
            fields.number("hc_eps", 1e-6, high=1.0),
        ),
        num_mtp_layers=fields.integer("num_nextn_predict_layers", 0, 0, MAX_LAYERS),
    )


def _check_supported(fields: Fields) -> None:
    """Raise for what would be computed wrongly if it were ignored."""
    for name, only in (("hidden_act", "silu"), ("scoring_func", "sqrtsoftplus")):
        if fields.text(name, only) != only:
            raise fields.value_error(name, f"{only} in this architecture")
    for name in ("attention_bias", "mlp_bias"):
        if fields.boolean(name, False):
            raise fields.value_error(name, "false in this architecture")
    if not fields.boolean("norm_topk_prob", True):
        raise fields.value_error("norm_topk_prob", "true in this architecture")


def _read_rope_dim(fields: Fields, head_dim: int) -> int:
    if fields.has("partial_rotary_factor"):
        name, rope_dim = "partial_rotary_factor", int(head_dim * fields.number("partial_rotary_factor", high=1.0))
    else:
        name, rope_dim = "qk_rope_head_dim", fields.integer("qk_rope_head_dim", 64, high=head_dim)
    if rope_dim % 2 or not rope_dim:
        raise fields.value_error(name, f"such that an even number of head_dim's {head_dim} elements rotates")
    return rope_dim


def _read_rope(fields: Fields, kind: str, rope_dim: int) -> RopeConfig:
    """Of dense layers (``main``) or of the others; YaRN is the others' alone, without a factor on cosine and sine."""
    theta_name, theta = _THETAS[kind]
    stated = fields.nested("rope_parameters")
    settings: Mapping[str, object]
    if isinstance(stated.values.get(kind), dict):
        settings = stated.nested(kind).values
    else:
        flat = stated if stated.values else fields.nested("rope_scaling")
        scaling = flat.values if kind == "compress" else {}
        settings = {**scaling, "rope_theta": fields.number(theta_name, theta, 1.0)}
    known = {"rope_parameters": dict(settings), "max_position_embeddings": fields.integer("max_position_embeddings", 1)}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if settings.get(name) not in (None, 1):
            raise Fields(settings, fields.where).value_error(name, "1 in this architecture, whose rope has no factor")
    rope, _ = read_rope(Fields(known, fields.where), rope_dim)
    if isinstance(rope.scaling, YarnRope):
        return replace(rope, scaling=replace(rope.scaling, attention_factor=1.0, score_temperature=1.0))
    return rope


def _read_compressed(fields: Fields, num_layers: int, rope_dim: int, entry_rope: RopeConfig) -> CompressedConfig:
    rates = _read_rates(fields)
    num_heads = fields.integer("num_attention_heads", high=MAX_WIDTH)
    num_groups = fields.integer("o_groups", 8, high=num_heads)
    if num_heads % num_groups:
        raise fields.value_error("o_groups", f"a divisor of num_attention_heads, {num_heads}")
    index_dim = fields.integer("index_head_dim", 128, low=rope_dim, high=MAX_WIDTH)
    return CompressedConfig(
        ratios=_read_ratios(fields, num_layers, rates),
        sparse_ratio=rates[SPARSE],
        window=fields.integer("sliding_window", 128, high=1 << 16),
        q_rank=fields.integer("q_lora_rank", high=MAX_WIDTH),
        rope_dim=rope_dim,
        entry_rope=entry_rope,
        num_groups=num_groups,
        group_rank=fields.integer("o_lora_rank", 1024, high=MAX_WIDTH),
        num_index_heads=fields.integer("index_n_heads", 64, high=MAX_WIDTH),
        index_dim=index_dim,
        top_k=fields.integer("index_topk", 512, high=1 << 20),
    )


def _read_rates(fields: Fields) -> dict[str, int]:
    """Tokens of an entry by kind of layer; no two kinds share one, as a published list could not tell them apart."""
    stated = fields.nested("compress_rates")
    rates = {
        kind: stated.integer(kind, fields.integer(old, _RATES[kind], high=_MAX_RATE), high=_MAX_RATE)
        for kind, old in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca"))
    }
    if rates[SPARSE] == rates[HEAVY]:
        raise fields.value_error("compress_rates", "different for the two kinds of layers")
    return rates


def _read_ratios(fields: Fields, num_layers: int, rates: Mapping[str, int]) -> tuple[int, ...]:
    """Of each layer, by either form."""
    if not fields.has("layer_types"):
        return _published_ratios(fields, num_layers, rates)
    ratios = _ratios_of_types(fields, num_layers, {DENSE: 0, **rates})
    if fields.has("compress_ratios") and _published_ratios(fields, num_layers, rates) != ratios:
        raise fields.value_error("compress_ratios", "those of layer_types, or left out")
    return ratios


def _published_ratios(fields: Fields, num_layers: int, rates: Mapping[str, int]) -> tuple[int, ...]:
    """Of each layer, from a list that goes on with the draft layers."""
    ratios = fields.integers("compress_ratios")
    if len(ratios) < num_layers:
        raise ModelFilesError(
            f"{fields.where}: compress_ratios lists {len(ratios)} layers of {num_layers}: correct it, or download the "
            "file again"
        )
    wrong = sorted(set(ratios) - {0, *rates.values()})
    if wrong:
        known = ", ".join(str(ratio) for ratio in sorted({0, *rates.values()}))
        raise ModelFilesError(
            f"{fields.where}: compress_ratios holds {', '.join(map(str, wrong))}, but a layer's ratio is one of "
            f"{known}: correct it, or name the rates in compress_rates"
        )
    return tuple(ratios[:num_layers])


def _ratios_of_types(fields: Fields, num_layers: int, known: Mapping[str, int]) -> tuple[int, ...]:
    kinds = fields.texts("layer_types")
    if len(kinds) < num_layers or not set(kinds) <= set(known):
        raise fields.value_error("layer_types", f"{num_layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds[:num_layers])


def _read_moe(fields: Fields, num_layers: int, width: int) -> MoeConfig:
    num_experts = fields.integer("n_routed_experts", high=MAX_WIDTH)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok", high=num_experts),
        intermediate_size=width,
        normalise_top_k=True,
        shared_size=fields.integer("n_shared_experts", 1, low=0, high=MAX_WIDTH) * width,
        scale=fields.number("routed_scaling_factor", 1.5),
        hash_layers=_read_hash_layers(fields, num_layers),
        limit=fields.number("swiglu_limit", 10.0),
    )


def _read_hash_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Layers whose experts go by the token's id."""
    if not fields.has("mlp_layer_types"):
        return frozenset(range(min(num_layers, fields.integer("num_hash_layers", _NUM_HASH_LAYERS, low=0))))
    kinds = fields.texts("mlp_layer_types")
    if len(kinds) < num_layers or not set(kinds) <= {"hash_moe", "moe"}:
        raise fields.value_error("mlp_layer_types", f"{num_layers} of hash_moe, moe")
    return frozenset(layer for layer in range(num_layers) if kinds[layer] == "hash_moe")
