"""The gated MLP, dense and as one of many experts.

Shapes: T tokens, D the hidden size, I a rank's shard of the MLP's width, E experts, K experts a token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from plait_kernels.linear import RowNorm, add_rms_norm_quantise, silu_mul_matmul
from plait_kernels.moe import Fp8Experts
from torch import Tensor

from plait_worker.expert_parallel import GroupExperts
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.norm import BlockNorm
from plait_worker.layers.router import Chosen, read_router
from plait_worker.model_config import ModelConfig, MoeConfig
from plait_worker.parallel import Parallel, Shard
from plait_worker.rank_sums import Summand
from plait_worker.weights.formats.read import read_experts
from plait_worker.weights.reader import ExpertShards, MatrixShard, Weights


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, weights: Weights, parallel: Parallel, size: int | None = None) -> None:
        """Read ``gate_proj``, ``up_proj`` and ``down_proj``; ``size`` is the width if not ``intermediate_size``."""
        width = Projection("gate_proj", size or config.intermediate_size)
        both = (width, Projection("up_proj", size or config.intermediate_size))
        self.gate_up = ColumnLinear(weights, both, config.hidden_size, parallel, config.mlp_bias)
        self.down = RowLinear(weights, "down_proj", width, config.hidden_size, parallel, config.mlp_bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """``[T, D]``, this rank's partial sum."""
        return silu_mul_matmul(self.gate_up(x_TD), self.down.multiply)

    def with_norm(self, x_TD: Tensor, residual_TD: Tensor, norm: BlockNorm) -> tuple[Summand, Tensor]:
        """The same for ``norm(x + residual)``; also returns that sum."""
        x_TD, residual_TD = norm.add(x_TD, residual_TD)
        return self(x_TD), residual_TD


@dataclass(frozen=True, slots=True)
class MoeNames:
    """Weight names of a mixture of experts."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    """Of the router, if it has one."""


class SparseMlp:
    """A router chooses K of E gated MLPs for each token; a shared MLP may serve all tokens. A rank has a shard of each.

    On a GPU the shared MLP is cut into experts that every token is routed to, which saves kernel launches. In a group
    that shares its experts a rank has whole ones, and the shared MLP is a dense part of each replica.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        weights: Weights,
        parallel: Parallel,
        names: MoeNames = MoeNames(),
    ) -> None:
        """Read the router ``gate``, ``experts.N`` and, if the model has them, ``shared_experts``."""
        group = parallel.experts
        cuts_shared = weights.device.type == "cuda" and moe.groups is not None and group is None
        num_shared = moe.shared_size // moe.intermediate_size if cuts_shared else 0
        self.router = read_router(moe, config.hidden_size, weights, names.bias, num_shared)
        wide = (moe.intermediate_size, config.hidden_size)
        shard = parallel.shard(moe.intermediate_size) if group is None else range(moe.intermediate_size)
        held = range(moe.num_experts) if group is None else group.own_experts(moe.num_experts)
        routed = (_shards(f"experts.{expert}.", names, wide, shard) for expert in held)
        self.shared: GatedMlp | None = None
        shared: list[ExpertShards] = []
        if num_shared:
            shared = cut_shared(config, moe, parallel, num_shared)
        elif moe.shared_size:
            self.shared = GatedMlp(config, weights.with_prefix("shared_experts"), parallel, moe.shared_size)
        # Not listed before they are read: counting random weights stops at the first that cannot fit.
        experts = read_experts(weights, itertools.chain(routed, shared))
        place = parallel.peers.add_place(f"{weights.prefix}experts")
        self.experts = experts if group is None else GroupExperts(experts, held, group, place)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """``[T, D]``, this rank's partial sum."""
        return self._mixed(x_TD, self.router(x_TD))

    def with_norm(self, x_TD: Tensor, residual_TD: Tensor, norm: BlockNorm) -> tuple[Summand, Tensor]:
        """The same for ``norm(x + residual)``; also returns that sum."""
        if isinstance(self.experts, Fp8Experts) and norm.is_own(x_TD) and self.experts.takes_rows(len(x_TD)):
            return self._quantised(self.experts, x_TD, RowNorm(residual_TD, norm.weight_D, norm.eps))
        chosen, x_TD, residual_TD = self.router.with_norm(x_TD, residual_TD, norm)
        if isinstance(self.experts, GroupExperts):
            dense_TD = None if self.shared is None else self.shared(x_TD)
            return self.experts.summand(x_TD, *chosen, dense_TD), residual_TD
        return self._mixed(x_TD, chosen), residual_TD

    def _quantised(self, experts: Fp8Experts, x_TD: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        """The norm also quantises, for the experts."""
        x_TD, rows, residual_TD = add_rms_norm_quantise(x_TD, norm, is_grouped=experts.is_grouped)
        return self._with_shared(experts(x_TD, *self.router(x_TD), rows), x_TD), residual_TD

    def _mixed(self, x_TD: Tensor, chosen: Chosen) -> Tensor:
        return self._with_shared(self.experts(x_TD, *chosen), x_TD)

    def _with_shared(self, out_TD: Tensor, x_TD: Tensor) -> Tensor:
        return out_TD if self.shared is None else out_TD + self.shared(x_TD)


def _shards(prefix: str, names: MoeNames, wide: tuple[int, int], own: range) -> ExpertShards:
    """Gate and up, then down, of a rank's rows ``own`` of an MLP of shape ``wide``, ``(I, D)``."""
    shard, tall = Shard(own), wide[::-1]
    gate_up = [MatrixShard(f"{prefix}{name}.weight", wide, rows=shard) for name in (names.gate, names.up)]
    return gate_up, [MatrixShard(f"{prefix}{names.down}.weight", tall, columns=shard)]


def cut_shared(config: ModelConfig, moe: MoeConfig, parallel: Parallel, num_experts: int) -> list[ExpertShards]:
    """This rank's shard of the shared MLP, cut into experts of the usual width: it is their sum."""
    shard, wide = parallel.shard(moe.shared_size), (moe.shared_size, config.hidden_size)
    size = len(shard) // num_experts
    cuts = [shard[first : first + size] for first in range(0, len(shard), size)]
    return [_shards("shared_experts.", MoeNames(), wide, cut) for cut in cuts]
