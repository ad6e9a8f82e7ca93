"""Decoder layers on a GPU with fewer kernels.

Rope and the cache write are one kernel for any number of rows. For one row on one GPU, where a step takes as long as
reading the weights, each norm and the gate are fused into the GEMV next to them; for a few with FP8 weights, the gate.

Shapes: T tokens of the step, D the hidden size, H query heads of this rank, E a head's width, O outputs of a GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plait_kernels.activation import silu_mul
from plait_kernels.linear import (
    Fp8Matrix,
    GpuMatrix,
    Int4Matrix,
    Matrix,
    RowNorm,
    gate_up_silu,
    rmsnorm_gate_up_silu,
    rmsnorm_gemv,
    silu_mul_matmul,
)
from plait_kernels.rope import HeadNorm, rotate_and_store
from torch import Tensor

from plait_worker.attention.backend import SlotMappedStep, StepAttention
from plait_worker.cache import KVCache
from plait_worker.layers.gqa import GqaAttention
from plait_worker.layers.mlp import GatedMlp
from plait_worker.layers.norm import BlockNorm
from plait_worker.models.block import Block, Step
from plait_worker.models.hidden_sums import HiddenSums
from plait_worker.rank_sums import Summand
from plait_worker.weights.formats.fp8 import compile_gates

FusedMatrix = GpuMatrix | Fp8Matrix | Int4Matrix
"""Those that are held on a GPU."""


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A dense block's weights, shared with its layers."""

    attention_norm: BlockNorm
    qkv: FusedMatrix
    num_heads: int
    """H."""
    head_dim: int
    """E."""
    head_norm: HeadNorm | None
    output: FusedMatrix
    mlp_norm: BlockNorm
    gate_up: FusedMatrix
    down: FusedMatrix

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor, step: Step[SlotMappedStep], pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output and the residual stream; the next norm adds the two."""
        qkv_TO, residual_TD = rmsnorm_matmul(x_TD, residual_TD, self.attention_norm, self.qkv)
        x_TD = self.output(self._attend(qkv_TO, step, pages))
        if _gates(self.gate_up, x_TD.shape[0]):
            gated_TO, residual_TD = _rmsnorm_gate_up(x_TD, residual_TD, self.mlp_norm, self.gate_up)
            return self.down(gated_TO), residual_TD
        gate_up_TO, residual_TD = rmsnorm_matmul(x_TD, residual_TD, self.mlp_norm, self.gate_up)
        return self.gated_down(gate_up_TO), residual_TD

    def attend(self, normed_TD: Tensor, step: Step[SlotMappedStep], pages: Tensor) -> Tensor:
        """See ``PartedBlock``."""
        return self._attend(self.qkv(normed_TD), step, pages)

    def gated_down(self, gate_up_NO: Tensor) -> Tensor:
        """See ``PartedBlock``."""
        return silu_mul_matmul(gate_up_NO, self.down)

    def _attend(self, qkv_TO: Tensor, step: Step[SlotMappedStep], pages: Tensor) -> Tensor:
        qkv_THE, attention = qkv_TO.view(qkv_TO.shape[0], -1, self.head_dim), step.attention
        tables = step.cos_T1D, step.sin_T1D
        q_THE = rotate_and_store(
            qkv_THE, self.num_heads, *tables, self.head_norm, pages, attention.slot_mapping_T, step.scales
        )
        return attention.attend(q_THE, pages, step.scales).flatten(1)


class FusedStack:
    """All blocks of a model and its final norm, on a rank's GPU."""

    def __init__(self, blocks: Sequence[FusedBlock], norm: BlockNorm) -> None:
        """Nothing is copied."""
        self._blocks = blocks
        self._norm = norm
        self._hidden_sums = HiddenSums(blocks, norm)

    def forward(self, x_TD: Tensor, steps: Sequence[Step[SlotMappedStep]], cache: KVCache) -> Tensor:
        """Hidden states after the final norm, ``[T, D]``; one of ``steps`` for each layer."""
        if self._hidden_sums.takes(x_TD):
            return self._hidden_sums.forward(x_TD, steps, cache)
        residual_TD = torch.zeros_like(x_TD)
        for block, step, pages in zip(self._blocks, steps, cache.layers, strict=True):
            x_TD, residual_TD = block.forward(x_TD, residual_TD, step, pages)
        return self._norm.add(x_TD, residual_TD)[0]


def read_fused(blocks: Sequence[Block[StepAttention]], norm: BlockNorm) -> FusedStack | None:
    """The blocks in fused form, on every rank or on none; None if one of them is of another kind."""
    fused = [_fused_block(block) for block in blocks]
    whole = [block for block in fused if block is not None]
    return FusedStack(whole, norm) if len(whole) == len(blocks) else None


def _fused_block(block: Block[StepAttention]) -> FusedBlock | None:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, GqaAttention) or not isinstance(mlp, GatedMlp):
        return None
    if attention.output.has_bias or mlp.down.has_bias:  # which rank 0 alone holds
        return None
    matrices = [layer.multiply for layer in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    plain = [each for each in matrices if isinstance(each, FusedMatrix) and each.bias_O is None]
    if len(plain) < len(matrices):
        return None
    qkv, output, gate_up, down = plain
    if isinstance(gate_up, Fp8Matrix):
        compile_gates(gate_up)
    return FusedBlock(
        attention_norm=block.attention_norm,
        qkv=qkv,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        head_norm=_head_norm(attention),
        output=output,
        mlp_norm=block.mlp_norm,
        gate_up=gate_up,
        down=down,
    )


def _head_norm(attention: GqaAttention) -> HeadNorm | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return HeadNorm(attention.q_norm.weight_D, attention.k_norm.weight_D, attention.q_norm.eps)


def rmsnorm_matmul(x_TD: Summand, residual_TD: Tensor, norm: BlockNorm, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """The GEMM of the sum's norm, ``[T, O]``, and the sum; one kernel for one row on a GPU."""
    row_norm = RowNorm(residual_TD, norm.weight_D, norm.eps)
    if norm.fuses_row(x_TD) and isinstance(matrix, GpuMatrix | Fp8Matrix) and matrix.bias_O is None:
        return rmsnorm_gemv(x_TD, row_norm, matrix.weight_OI, matrix.row_tile)
    if norm.is_own(x_TD) and isinstance(matrix, Fp8Matrix) and x_TD.shape[0] > 1:
        return matrix.rmsnorm_matmul(x_TD, row_norm)
    normed_TD, residual_TD = norm.add(x_TD, residual_TD)
    return matrix(normed_TD), residual_TD


def _gates(matrix: FusedMatrix, num_rows: int) -> bool:
    """Whether ``_rmsnorm_gate_up`` takes so many rows."""
    return matrix.gates(num_rows) if isinstance(matrix, Fp8Matrix) else num_rows == 1


def _rmsnorm_gate_up(x_TD: Tensor, residual_TD: Tensor, norm: BlockNorm, matrix: FusedMatrix) -> tuple[Tensor, Tensor]:
    """The same, followed by the gate: ``[T, O / 2]``."""
    row_norm = RowNorm(residual_TD, norm.weight_D, norm.eps)
    if isinstance(matrix, GpuMatrix) and norm.fuses_row(x_TD):
        return rmsnorm_gate_up_silu(x_TD, row_norm, matrix.weight_OI)
    if isinstance(matrix, Fp8Matrix) and norm.is_own(x_TD):
        return matrix.rmsnorm_gate_up(x_TD, row_norm)
    normed_TD, residual_TD = norm.add(x_TD, residual_TD)
    return _gate_up(normed_TD, matrix), residual_TD


def _gate_up(normed_TD: Tensor, matrix: FusedMatrix) -> Tensor:
    if isinstance(matrix, Fp8Matrix):
        return matrix.gate_up(normed_TD)
    return gate_up_silu(normed_TD, matrix.weight_OI) if isinstance(matrix, GpuMatrix) else silu_mul(matrix(normed_TD))
