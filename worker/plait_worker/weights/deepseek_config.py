"""What DeepSeek-V2 and V3 state in ``config.json`` beyond other families: latent attention and grouped routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait_kernels.moe import GroupLimit

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import GroupRouting, MlaConfig, MoeConfig, RopeConfig, YarnRope
from plait_worker.weights.fields import Fields

_MAX_WIDTH = 1 << 20


def read_v2_mla(fields: Fields, rope: RopeConfig) -> MlaConfig:
    """V2's files have rope rotate neighbours."""
    return _read_mla(fields, rope, is_interleaved=True)


def read_v3_mla(fields: Fields, rope: RopeConfig) -> MlaConfig:
    """V3's files say what rope rotates."""
    return _read_mla(fields, rope, is_interleaved=fields.boolean("rope_interleave", True))


def _read_mla(fields: Fields, rope: RopeConfig, is_interleaved: bool) -> MlaConfig:
    """The widths of the attention's parts; raises ``ModelFilesError`` if rope cannot turn pairs."""
    rope_dim = fields.integer("qk_rope_head_dim", high=_MAX_WIDTH)
    nope_dim = fields.integer("qk_nope_head_dim", high=_MAX_WIDTH)
    if rope_dim % 2:
        raise fields.value_error("qk_rope_head_dim", "even")
    temperature = rope.scaling.score_temperature if isinstance(rope.scaling, YarnRope) else 1.0
    return MlaConfig(
        q_rank=fields.integer("q_lora_rank", high=_MAX_WIDTH) if fields.has("q_lora_rank") else None,
        latent_dim=fields.integer("kv_lora_rank", high=_MAX_WIDTH),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", high=_MAX_WIDTH),
        scale=(nope_dim + rope_dim) ** -0.5 * temperature**2,
        is_interleaved=is_interleaved,
    )


def read_v2_moe(fields: Fields, num_layers: int) -> MoeConfig | None:
    """The experts; None if the files state no routed ones. V2's router never normalises, whatever its files say."""
    return _read_moe(fields, num_layers, _read_v2_routing) if fields.has("n_routed_experts") else None


def read_v3_moe(fields: Fields, num_layers: int) -> MoeConfig | None:
    """The experts; None if the files state no routed ones."""
    if not fields.has("n_routed_experts"):
        return None
    moe = _read_moe(fields, num_layers, _read_v3_routing)
    return replace(moe, normalise_top_k=fields.boolean("norm_topk_prob", True))


def _read_moe(fields: Fields, num_layers: int, read_routing: Callable[[Fields], GroupRouting]) -> MoeConfig:
    num_experts = fields.integer("n_routed_experts", high=_MAX_WIDTH)
    top_k = fields.integer("num_experts_per_tok", high=_MAX_WIDTH)
    width = fields.integer("moe_intermediate_size", high=_MAX_WIDTH)
    routing = read_routing(fields)
    _check_groups(fields, routing, num_experts, top_k)
    num_dense, every = fields.integer("first_k_dense_replace", 0, low=0), fields.integer("moe_layer_freq", 1)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=top_k,
        intermediate_size=width,
        normalise_top_k=False,
        dense_layers=frozenset(n for n in range(num_layers) if n < num_dense or n % every),
        shared_size=fields.integer("n_shared_experts", 0, low=0, high=_MAX_WIDTH) * width,
        groups=routing,
    )


def _read_v2_routing(fields: Fields) -> GroupRouting:
    _check_only_value(fields, "scoring_func", "softmax")
    scale = fields.number("routed_scaling_factor", 1.0)
    method = fields.text("topk_method", "greedy")
    if method == "greedy":
        return GroupRouting("softmax", GroupLimit(1, 1), scale)
    _check_only_value(fields, "topk_method", "group_limited_greedy")
    return GroupRouting("softmax", GroupLimit(fields.integer("n_group"), fields.integer("topk_group")), scale)


def _read_v3_routing(fields: Fields) -> GroupRouting:
    _check_only_value(fields, "scoring_func", "sigmoid")
    _check_only_value(fields, "topk_method", "noaux_tc")
    limit = GroupLimit(fields.integer("n_group", 8), fields.integer("topk_group", 4))
    return GroupRouting("sigmoid", limit, fields.number("routed_scaling_factor", 2.5))


def _check_only_value(fields: Fields, name: str, allowed: str) -> None:
    """Raise if the field is present and different."""
    if fields.text(name, allowed) != allowed:
        raise fields.value_error(name, f"{allowed} in this architecture")


def _check_groups(fields: Fields, routing: GroupRouting, num_experts: int, top_k: int) -> None:
    """Raise ``ModelFilesError`` if the router cannot choose ``top_k`` experts from the groups it keeps."""
    limit = routing.limit
    if num_experts % limit.num_groups or limit.num_kept > limit.num_groups:
        raise ModelFilesError(
            f"{fields.where}: {num_experts} experts in {limit.num_groups} groups, of which {limit.num_kept} are kept: "
            "n_group must divide n_routed_experts, and topk_group be at most n_group"
        )
    group_size = num_experts // limit.num_groups
    if top_k > limit.num_kept * group_size or (routing.scoring == "sigmoid" and group_size < 2):
        raise ModelFilesError(
            f"{fields.where}: {top_k} experts a token cannot come from {limit.num_kept} groups of {group_size}"
        )
