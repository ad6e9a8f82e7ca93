"""A decoder layer, which our code calls a block, and what layers of a step share.

Shapes: T tokens of the step, D the hidden size; cosine and sine tables are ``[T, 1, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from plait_kernels.kv_cache import UNSCALED, PageScales
from torch import Tensor

from plait_worker.attention.backend import StepAttention
from plait_worker.layers.norm import BlockNorm
from plait_worker.model_config import ModelConfig
from plait_worker.parallel import Parallel
from plait_worker.rank_sums import Summand
from plait_worker.weights.reader import Weights

PreparedT = TypeVar("PreparedT")


@dataclass(frozen=True, slots=True)
class Step(Generic[PreparedT]):
    """What layers of one step share: all those with the same attention and scales."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    attention: PreparedT
    scales: PageScales = UNSCALED
    """Of the layers' pages."""


MhaStep = Step[StepAttention]
"""Of families with MHA or GQA."""


class Attention(Protocol[PreparedT]):
    """A family's attention: projections, rope, cache."""

    def __call__(self, x_TD: Tensor, step: Step[PreparedT], pages: Tensor) -> Tensor:
        """``[T, D]``, this rank's partial sum; writes the step's keys and values into the layer's pages."""
        ...


class Block(Generic[PreparedT]):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; each sum is fused with the norm after it.

    Attention and MLP give a rank's partial sum. The norm adds the ranks'.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: Attention[PreparedT],
        mlp: Callable[[Tensor], Tensor],
        parallel: Parallel,
    ) -> None:
        """Read the two norms."""
        self.attention_norm = BlockNorm(weights, "input_layernorm", config, parallel)
        self.attention = attention
        self.mlp_norm = BlockNorm(weights, "post_attention_layernorm", config, parallel)
        self.mlp = mlp

    def __call__(
        self, x_TD: Summand, residual_TD: Tensor, step: Step[PreparedT], pages: Tensor
    ) -> tuple[Summand, Tensor]:
        """The MLP's output and the residual stream; the next norm adds the two."""
        normed_TD, residual_TD = self.attention_norm.add(x_TD, residual_TD)
        attended_TD = self.attention(normed_TD, step, pages)
        normed_TD, residual_TD = self.mlp_norm.add(attended_TD, residual_TD)
        return self.mlp(normed_TD), residual_TD


BlockReader = Callable[[ModelConfig, int, Weights, Parallel], Block[PreparedT]]
"""Reads the block of the given layer from the tensors below ``model.layers.N``."""
