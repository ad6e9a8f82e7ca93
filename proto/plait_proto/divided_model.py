"""Whether ranks can divide a model: a rank refuses as it starts, the command line before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MAX_LISTED_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedModel:
    """What ranks divide of a model."""

    architecture: str
    num_heads: int
    has_mla: bool = False
    num_output_groups: int | None = None
    """Of DeepSeek-V4's attention."""
    mlp_width: int | None = None
    """Of dense layers; None if there are none."""
    num_experts: int = 0
    expert_width: int = 0
    has_shared_experts: bool = False

    def sizes(self, *, whole_experts: bool) -> Iterator[tuple[str, int]]:
        """Sizes that the ranks must divide evenly; MHA and GQA heads are padded instead."""
        if self.has_mla:
            yield "attention heads (num_attention_heads)", self.num_heads
        if self.num_output_groups is not None:
            yield "output groups (o_groups)", self.num_output_groups
        if self.mlp_width is not None:
            yield "MLP width (intermediate_size)", self.mlp_width
        if self.num_experts and (self.has_shared_experts or not whole_experts):
            # Shared experts have this width or a multiple of it, and are always divided.
            yield "experts' width (moe_intermediate_size)", self.expert_width


def check_layout(model: DividedModel, tp: int, dp: int, *, dp_attention: bool) -> None:
    """Raise ``ValueError`` with what to do if this many ranks and replicas cannot divide the model."""
    if dp_attention:
        if model.num_output_groups is not None:
            raise ValueError(f"--dp-attention is not supported for {model.architecture}; leave it out")
        check_shares_experts(model, tp * dp)
    check_divisible(model, tp, whole_experts=dp_attention)


def check_divisible(model: DividedModel, tp: int, *, whole_experts: bool = False) -> None:
    """Raise ``ValueError`` that names the dimension which the ranks cannot divide, and the numbers that work."""
    sizes = dict(model.sizes(whole_experts=whole_experts))
    most = min(model.num_heads, _MAX_LISTED_RANKS)
    working = (str(ranks) for ranks in range(1, most + 1) if all(size % ranks == 0 for size in sizes.values()))
    if model.num_heads < tp:
        raise ValueError(f"--tp {tp} is more than the model's {model.num_heads} attention heads; {_listed(working)}")
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(f"--tp {tp} does not divide the model's {name}, {size}; {_listed(working)}")


def check_shares_experts(model: DividedModel, num_ranks: int) -> None:
    """Raise ``ValueError`` with what to do if replicas of the model cannot share its experts."""
    parts = (("multi-head latent attention (MLA)", model.has_mla), ("experts", model.num_experts > 0))
    if missing := " and ".join(name for name, is_there in parts if not is_there):
        raise ValueError(
            f"--dp-attention: {model.architecture} has no {missing}; leave it out and serve free replicas with --dp, "
            "or divide each layer with --tp"
        )
    if num_ranks > model.num_experts:
        raise ValueError(
            f"--dp-attention: {num_ranks} ranks (--dp times --tp) are more than the model's {model.num_experts} "
            f"experts, and each rank holds one at least; set --dp times --tp to {model.num_experts} at most"
        )


def _listed(working: Iterator[str]) -> str:
    return f"these values of --tp work: {', '.join(working)}"
