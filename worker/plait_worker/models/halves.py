"""Steps of many prompt tokens on several GPUs: partial sums of half the rows travel while the other half is computed.

Only attention needs all rows at once. Between two layers' attentions each half goes by itself, and its sums over the
ranks are hidden behind the GEMMs of the other. Shapes: T tokens of the step, D the hidden size, O outputs of a GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol

import torch
from plait_kernels.linear import Fp8Matrix, GpuMatrix
from torch import Tensor

from plait_worker.cache import KVCache
from plait_worker.layers.norm import BlockNorm, PendingNorm
from plait_worker.models.block import PreparedT, Step
from plait_worker.peers import halves


class HalvedBlock(Protocol[PreparedT]):
    """A block by the parts that take a half of the rows, and attention between them."""

    @property
    def attention_norm(self) -> BlockNorm:
        """Before the projection."""
        ...

    @property
    def mlp_norm(self) -> BlockNorm:
        """Before the MLP."""
        ...

    @property
    def projection(self) -> GpuMatrix | Fp8Matrix:
        """What attention begins with, without bias."""
        ...

    def attend(self, projected_TO: Tensor, step: Step[PreparedT], pages: Tensor) -> Tensor:
        """``[T, O]`` from the projections of all rows, before the output projection."""
        ...

    def output(self, attended_TO: Tensor) -> Tensor:
        """``[T, D]`` of any rows, this rank's partial sum."""
        ...

    @property
    def mlp(self) -> Callable[[Tensor], Tensor]:
        """``[T, D]`` of any rows, this rank's partial sum."""
        ...


class HalvedStack(Generic[PreparedT]):
    """All blocks of a model and its final norm."""

    def __init__(self, blocks: Sequence[HalvedBlock[PreparedT]], norm: BlockNorm) -> None:
        """Nothing is copied."""
        self._blocks = blocks
        self._norm = norm

    def hides(self, x_TD: Tensor) -> bool:
        """Whether ``forward`` takes the embedded tokens of a step."""
        return self._norm.parallel.peers.hides(x_TD)

    def forward(self, x_TD: Tensor, steps: Sequence[Step[PreparedT]], cache: KVCache) -> Tensor:
        """Hidden states after the final norm, ``[T, D]``; one of ``steps`` for each layer."""
        residual_TD, both = torch.zeros_like(x_TD), halves(x_TD.shape[0])
        norms_after = [*(block.attention_norm for block in self._blocks[1:]), self._norm]
        first = self._blocks[0].attention_norm
        pending = [first.begin_add(x_TD[rows], residual_TD[rows]) for rows in both]
        for block, after, pages, step in zip(self._blocks, norms_after, cache.layers, steps, strict=True):
            projected_TO, residuals = _project(block.projection, pending)
            attended_TO = block.attend(projected_TO, step, pages)
            pending = [
                block.mlp_norm.begin_add(block.output(attended_TO[rows]), residual_TD)
                for rows, residual_TD in zip(both, residuals, strict=True)
            ]
            for half, norm in enumerate(pending):
                normed_TD, residual_TD = norm.finish()
                pending[half] = after.begin_add(block.mlp(normed_TD), residual_TD)
        return torch.cat([norm.finish()[0] for norm in pending])


def _project(matrix: GpuMatrix | Fp8Matrix, pending: Sequence[PendingNorm]) -> tuple[Tensor, list[Tensor]]:
    """``[T, O]`` of the halves' norms, and their residual streams."""
    num_rows, residuals = sum(len(norm.residual_ND) for norm in pending), list[Tensor]()
    projected_TO = pending[0].residual_ND.new_empty(num_rows, matrix.weight_OI.shape[0])
    for rows, norm in zip(halves(num_rows), pending, strict=True):
        normed_TD, residual_TD = norm.finish()
        matrix.matmul_out(normed_TD, projected_TO[rows])
        residuals.append(residual_TD)
    return projected_TO, residuals
