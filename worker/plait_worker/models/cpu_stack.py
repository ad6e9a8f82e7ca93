"""All decoder layers in one call of a compiled CPU kernel.

Shapes: T tokens of the step, D the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_kernels.decoder import DenseBlock, DenseStack, can_stack
from plait_kernels.linear import CpuMatrix
from torch import Tensor

from plait_worker.attention.backend import StepAttention
from plait_worker.attention.mha.cpu_mha import CpuMhaStep
from plait_worker.cache import KVCache
from plait_worker.layers.gqa import GqaAttention
from plait_worker.layers.mlp import GatedMlp
from plait_worker.layers.norm import RmsNorm
from plait_worker.models.block import Block
from plait_worker.parallel import Parallel


class CpuStack:
    """Dense blocks on one rank, for steps with the compiled CPU attention."""

    def __init__(self, blocks: Sequence[DenseBlock], norm: RmsNorm) -> None:
        """The weights are shared with the layers."""
        self._blocks = blocks
        self._norm = norm
        self._cache: KVCache | None = None
        self._bound: DenseStack | None = None

    def forward(self, x_TD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, step: CpuMhaStep, cache: KVCache) -> Tensor:
        """Hidden states after the final norm, written over the embeddings ``x_TD``; caches keys and values."""
        return self._bind(cache).forward(x_TD, cos_T1D, sin_T1D, step.rows)

    def _bind(self, cache: KVCache) -> DenseStack:
        if self._bound is None or self._cache is not cache:
            self._bound = DenseStack(self._blocks, self._norm.weight_D, self._norm.eps, cache.layers)
            self._cache = cache
        return self._bound


def read_cpu_stack(blocks: Sequence[Block[StepAttention]], norm: RmsNorm, parallel: Parallel) -> CpuStack | None:
    """The blocks for one kernel; None if one of them is of another kind, or with several ranks."""
    dense = [_dense_block(block) for block in blocks]
    whole = [block for block in dense if block is not None and can_stack(block)]
    return CpuStack(whole, norm) if parallel.world == 1 and len(whole) == len(blocks) else None


def _dense_block(block: Block[StepAttention]) -> DenseBlock | None:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, GqaAttention) or not isinstance(mlp, GatedMlp):
        return None
    matrices = [layer.multiply for layer in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    panels = [matrix for matrix in matrices if isinstance(matrix, CpuMatrix)]
    if len(panels) < len(matrices):
        return None
    qkv, output, gate_up, down = panels
    return DenseBlock(
        attention_norm_H=block.attention_norm.weight_D,
        q_norm_D=attention.q_norm.weight_D if attention.q_norm else None,
        k_norm_D=attention.k_norm.weight_D if attention.k_norm else None,
        qkv=qkv,
        output=output,
        mlp_norm_H=block.mlp_norm.weight_D,
        gate_up=gate_up,
        down=down,
    )
