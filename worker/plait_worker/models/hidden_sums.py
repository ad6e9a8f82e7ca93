"""Steps of many prompt tokens on several GPUs: parts of a partial sum travel while the GEMM makes the next parts.

Every GEMM whose outputs the ranks add is done in parts; all else takes the step's rows at once. Shapes: T tokens of the
step, N any rows, D the hidden size, I and O inputs and outputs of a GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol

import torch
from torch import Tensor

from plait_worker.cache import KVCache
from plait_worker.layers.norm import BlockNorm
from plait_worker.models.block import PreparedT, Step


class PartedBlock(Protocol[PreparedT]):
    """A block by its GEMMs and its attention."""

    @property
    def attention_norm(self) -> BlockNorm:
        """Before attention."""
        ...

    @property
    def mlp_norm(self) -> BlockNorm:
        """Before the MLP."""
        ...

    def attend(self, normed_TD: Tensor, step: Step[PreparedT], pages: Tensor) -> Tensor:
        """``[T, I]``, before the output projection."""
        ...

    def output(self, attended_NI: Tensor) -> Tensor:
        """``[N, D]``, this rank's partial sum."""
        ...

    @property
    def gate_up(self) -> Callable[[Tensor], Tensor]:
        """``[N, D]`` to ``[N, O]``, gates and values of the MLP."""
        ...

    def gated_down(self, gate_up_NO: Tensor) -> Tensor:
        """``[N, D]`` of gates and values, this rank's partial sum."""
        ...


class HiddenSums(Generic[PreparedT]):
    """All blocks of a model and its final norm."""

    def __init__(self, blocks: Sequence[PartedBlock[PreparedT]], norm: BlockNorm) -> None:
        """Nothing is copied."""
        self._blocks = blocks
        self._norm = norm

    def takes(self, x_TD: Tensor) -> bool:
        """Whether ``forward`` takes the embedded tokens of a step."""
        return self._norm.parallel.peers.hides(x_TD)

    def forward(self, x_TD: Tensor, steps: Sequence[Step[PreparedT]], cache: KVCache) -> Tensor:
        """Hidden states after the final norm, ``[T, D]``; one of ``steps`` for each layer."""
        norms_after = [*(block.attention_norm for block in self._blocks[1:]), self._norm]
        first = self._blocks[0].attention_norm
        normed_TD, residual_TD = first.add_parts(lambda partial_ND: partial_ND, x_TD, torch.zeros_like(x_TD))
        for block, after, pages, step in zip(self._blocks, norms_after, cache.layers, steps, strict=True):
            attended_TI = block.attend(normed_TD, step, pages)
            normed_TD, residual_TD = block.mlp_norm.add_parts(block.output, attended_TI, residual_TD)
            normed_TD, residual_TD = after.add_parts(block.gated_down, block.gate_up(normed_TD), residual_TD)
        return normed_TD
