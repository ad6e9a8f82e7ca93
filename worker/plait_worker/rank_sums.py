"""Sums of a layer's experts that are still spread over the ranks of a group: the norm after the layer collects them."""

from __future__ import annotations

from dataclasses import dataclass

from plait_kernels.collective import ExpertExchange, GatheredRows
from plait_kernels.moe import RowParts
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankSums:
    """This rank's part of the sums of all ranks' rows."""

    exchange: ExpertExchange
    made: RowParts
    gathered: GatheredRows
    dense_TD: Tensor | None
    """What else is added to this replica's rows."""

    def add_rms_norm(self, residual_TD: Tensor, weight_D: Tensor, eps: float, place: int) -> tuple[Tensor, Tensor]:
        """The norm of this replica's sums with the residual, and those."""
        return self.exchange.add_rms_norm(self.made, self.gathered, self.dense_TD, residual_TD, weight_D, eps, place)


Summand = Tensor | RankSums
"""What a part of a block adds to the residual stream, ``[T, D]``."""
