"""FP8 weights with one scale a block, as DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and MiniMax-M2 are published.

Shapes: R rows and C columns of a matrix; its scales are ``[ceil(R / block rows), ceil(C / block columns)]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """The size of a block."""

    rows: int
    columns: int

    def num_blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Along each side of a matrix of this shape; the last may be cut off by its edge."""
        num_rows, num_columns = shape
        return -(-num_rows // self.rows), -(-num_columns // self.columns)

    def dequantise(self, weight_RC: Tensor, scale: Tensor) -> Tensor:
        """float32 ``[R, C]``: every element times its block's scale, rounded once.

        Raises ``ValueError`` if it is no matrix, or has another number of blocks than scales.
        """
        self.check(weight_RC.shape, scale)
        scale_of_columns = scale.float().repeat_interleave(self.columns, dim=1)[:, : weight_RC.shape[1]]
        out_RC = weight_RC.to(torch.float32)
        for rows, scale_C in zip(out_RC.split(self.rows), scale_of_columns, strict=True):
            rows *= scale_C
        return out_RC

    def check(self, shape: tuple[int, ...], scale: Tensor) -> None:
        """Raise ``ValueError`` as ``dequantise`` does."""
        if len(shape) != 2:
            raise ValueError(f"its shape is {list(shape)}, but only matrices have blocks")
        num_blocks = self.num_blocks(shape)
        if tuple(scale.shape) != num_blocks:
            stated = f"{[self.rows, self.columns]} (weight_block_size or block_structure in quantization_config)"
            raise ValueError(f"its scales are {list(scale.shape)}, but blocks of {stated} ask for {list(num_blocks)}")


def scale_of_outputs(shape: tuple[int, ...], scale: Tensor) -> Tensor:
    """float32 ``[R]``, from one scale or one for each row.

    Raises ``ValueError`` if it is no matrix, or if there is another number of scales.
    """
    if len(shape) != 2:
        raise ValueError(f"its shape is {list(shape)}, but only matrices have scales")
    if scale.numel() not in (1, shape[0]):
        raise ValueError(f"its scales are {list(scale.shape)}; one, or one for each of {shape[0]} outputs, would fit")
    return scale.float().flatten().expand(shape[0])
