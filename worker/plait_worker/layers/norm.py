"""RMS norm with its weight.

Shapes: N rows, D the width, I inputs of a GEMM; P projections side by side, O their outputs on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch
from plait_kernels.norm import rms_norm
from torch import Tensor

from plait_worker.layers.linear import Projection
from plait_worker.model_config import ModelConfig
from plait_worker.parallel import Parallel
from plait_worker.rank_sums import RankSums, Summand
from plait_worker.weights.reader import Weights


class RmsNorm:
    """``x / rms(x) * weight``; every rank has the whole weight."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        """Read ``NAME.weight``."""
        self.weight_D = weights.take(f"{name}.weight", (width,))
        self.eps = eps

    def __call__(self, x_ND: Tensor) -> Tensor:
        """``[N, D]``."""
        return rms_norm(x_ND, self.weight_D, self.eps)


class BlockNorm(RmsNorm):
    """The norm before a part of a block: it also adds what the part before it made to the residual stream.

    That is one rank's partial sum: here the ranks' are added, in one launch with the norm if their GPUs can.
    """

    def __init__(self, weights: Weights, name: str, config: ModelConfig, parallel: Parallel) -> None:
        """Read ``NAME.weight``."""
        super().__init__(weights, name, config.hidden_size, config.norm_eps)
        self.parallel = parallel
        self._place = parallel.peers.add_place(f"{weights.prefix}{name}")

    def add(self, partial_ND: Summand, residual_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the ranks' sum and the residual; also returns that sum."""
        if isinstance(partial_ND, RankSums):
            return partial_ND.add_rms_norm(residual_ND, self.weight_D, self.eps, self._place)
        return self.parallel.add_rms_norm(partial_ND, residual_ND, self.weight_D, self.eps, self._place)

    def add_parts(self, gemm: Callable[[Tensor], Tensor], x_NI: Tensor, residual_ND: Tensor) -> tuple[Tensor, Tensor]:
        """``add`` of ``gemm(x)``, in a step that ``Peers.hides``: sums of some rows travel while it makes others."""
        return self.parallel.peers.add_parts_rms_norm(gemm, x_NI, residual_ND, self.weight_D, self.eps, self._place)

    def fuses_row(self, partial_ND: Summand) -> TypeGuard[Tensor]:
        """Whether this may be part of a GEMV: for one row, whose sum is complete on this rank."""
        return self.is_own(partial_ND) and partial_ND.shape[0] == 1

    def is_own(self, partial_ND: Summand) -> TypeGuard[Tensor]:
        """Whether the sum is complete on this rank."""
        return isinstance(partial_ND, Tensor) and self.parallel.world == 1


class ProjectionNorm:
    """Norms of several projections, each over all its outputs, of which a rank has a shard."""

    def __init__(
        self, weights: Weights, parts: Mapping[str, Projection], copies: Sequence[int], eps: float, parallel: Parallel
    ) -> None:
        """Read ``NAME.weight`` of each; ``copies`` is the number of ranks that hold the same outputs of it."""
        self.parallel = parallel
        self.eps = eps
        shards = [part.take(weights, f"{name}.weight", (part.num_outputs,), parallel) for name, part in parts.items()]
        self.widths = [len(shard) for shard in shards]
        self.weight_O = torch.cat(shards)
        counted = [part.num_outputs * copy for part, copy in zip(parts.values(), copies, strict=True)]
        self.per_square_P = 1.0 / torch.tensor(counted, dtype=torch.float32, device=self.weight_O.device)

    def __call__(self, x_NO: Tensor) -> Tensor:
        """``[N, O]``, rounded once."""
        parts = torch.split(x_NO.float(), self.widths, dim=1)
        squares_NP = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        mean_NP = self.parallel.all_reduce(squares_NP * self.per_square_P)
        factors = (mean_NP + self.eps).rsqrt().split(1, dim=1)
        normed_NO = torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], dim=1)
        return (normed_NO * self.weight_O).to(x_NO.dtype)
