"""FP8 weights with one scale a block, as DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and MiniMax-M2 are published.

Shapes: R rows and C columns of a matrix; its scales are ``[ceil(R / block rows), ceil(C / block columns)]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.fields import Fields
from plait_worker.weights.formats.dense import Dense

FP8 = "F8_E4M3"
"""What safetensors calls the weights' type."""
SCALE_TYPES = ("F32", "BF16", "F8_E8M0")
"""What it calls the types that scales come in."""
_FORMATS = ("e4m3", "float8_e4m3fn")
_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Fp8Blocks(Dense):
    """``WeightFormat`` of FP8 weights with a scale for each block; they are de-quantised as they are read."""

    rows: int
    """Of a block."""
    columns: int

    def num_blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Along each side of a matrix of this shape; the last may be cut off by its edge."""
        num_rows, num_columns = shape
        return -(-num_rows // self.rows), -(-num_columns // self.columns)

    def dequantise(self, weight_RC: Tensor, scale: Tensor) -> Tensor:
        """float32 ``[R, C]``: every element times its block's scale, rounded once.

        Raises ``ValueError`` if it is no matrix, or has another number of blocks than scales.
        """
        if weight_RC.ndim != 2:
            raise ValueError(f"its shape is {list(weight_RC.shape)}, but only matrices have blocks")
        num_blocks = self.num_blocks(weight_RC.shape)
        if tuple(scale.shape) != num_blocks:
            raise ValueError(f"its scales are {list(scale.shape)}, but its blocks {list(num_blocks)}")
        scale_of_columns = scale.float().repeat_interleave(self.columns, dim=1)[:, : weight_RC.shape[1]]
        out_RC = weight_RC.to(torch.float32)
        for rows, scale_C in zip(out_RC.split(self.rows), scale_of_columns, strict=True):
            rows *= scale_C
        return out_RC


def read_fp8_blocks(fields: Fields) -> Fp8Blocks | None:
    """What ``quantization_config`` of a ``config.json`` states; None if the weights are not quantised.

    Raises ``ModelFilesError`` for any other quantisation, by name.
    """
    if not fields.has("quantization_config"):
        return None
    stated = fields.nested("quantization_config")
    method, number_format = stated.text("quant_method", "of no name"), stated.text("fmt", _FORMATS[0])
    sides = stated.integers("weight_block_size")
    if method != "fp8" or number_format not in _FORMATS:
        raise _not_supported(fields, method if method != "fp8" else f"fp8 of format {number_format}")
    if len(sides) != 2 or not all(0 < side <= _MAX_BLOCK for side in sides):
        raise _not_supported(fields, f"fp8 with weight_block_size {sides or 'absent'}")
    if stated.text("activation_scheme", "dynamic") != "dynamic":
        raise _not_supported(fields, "fp8 with stored scales of activations")
    return Fp8Blocks(*sides)


def _not_supported(fields: Fields, what: str) -> ModelFilesError:
    return ModelFilesError(
        f"{fields.where}: quantisation {what} is not supported; fp8 weights with scales of two-dimensional blocks are, "
        "and GGUF's: use such files, or the unquantised model"
    )


def scale_name(weight_name: str) -> str:
    """The tensor with a weight's scales."""
    return f"{weight_name}_scale_inv"
