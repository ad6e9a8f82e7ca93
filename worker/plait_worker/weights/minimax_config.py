"""What MiniMax-M2 states in ``config.json`` beyond other families: which of its makers' variants it is."""

from __future__ import annotations

from plait_kernels.moe import GroupLimit

from plait_worker.model_config import GroupRouting, MoeConfig
from plait_worker.weights.fields import Fields

_MAX_WIDTH = 1 << 20
_FULL_ATTENTION = 1
"""In ``attn_type_list``; the makers' older models have linear attention too."""


def read_minimax_moe(fields: Fields, _num_layers: int) -> MoeConfig:
    """The mixture of experts; raises ``ModelFilesError`` for a variant that is not supported, by its field."""
    _check_variant(fields)
    return MoeConfig(
        num_experts=fields.integer("num_local_experts", high=_MAX_WIDTH),
        num_experts_per_token=fields.integer("num_experts_per_tok", high=_MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", high=_MAX_WIDTH),
        normalise_top_k=True,
        groups=GroupRouting("sigmoid", GroupLimit(1, 1), scale=1.0),
    )


def _check_variant(fields: Fields) -> None:
    for name, only in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if fields.text(name, only) != only:
            raise fields.value_error(name, f"{only} in this architecture")
    for name in ("use_qk_norm", "use_routing_bias"):
        if not fields.boolean(name, True):
            raise fields.value_error(name, "true in this architecture")
    if fields.integer("shared_intermediate_size", 0, low=0):
        raise fields.value_error("shared_intermediate_size", "0 in this architecture")
    if set(fields.integers("attn_type_list")) - {_FULL_ATTENTION}:
        raise fields.value_error("attn_type_list", f"{_FULL_ATTENTION} in every layer")
