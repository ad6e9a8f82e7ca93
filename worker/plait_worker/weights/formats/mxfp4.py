"""MXFP4 weights (OCP Microscaling Formats 1.0): two e2m1 values a byte, and one e8m0 scale for 32 of a row.

Shapes: R rows and C columns of a matrix; packed ``[R, C / 2]``, its scales ``[R, C / 32]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED = ("I8", "U8")
"""What safetensors calls the types that hold two values a byte."""
_GROUP = 32
_ROWS = 256
"""De-quantised at a time: whole matrices of indices would take sixteen times the packed bytes."""
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def unpacked_shape(packed_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the matrix that a packed one holds."""
    return (*packed_shape[:-1], 2 * packed_shape[-1])


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 ``[R, C]``; the low four bits of a byte come first.

    Raises ``ValueError`` if it is no matrix, or has another number of groups than scales.
    """
    if packed.ndim != 2:
        raise ValueError(f"its shape is {list(packed.shape)}, but only matrices have groups")
    num_rows, num_columns = unpacked_shape(tuple(packed.shape))
    if tuple(scale.shape) != (num_rows, num_columns // _GROUP) or num_columns % _GROUP:
        raise ValueError(
            f"its scales are {list(scale.shape)}, but {num_columns} columns in groups of {_GROUP} need "
            f"{[num_rows, -(-num_columns // _GROUP)]}"
        )
    out_RC = torch.empty(num_rows, num_columns)
    parts = zip(packed.view(torch.uint8).split(_ROWS), scale.split(_ROWS), out_RC.split(_ROWS), strict=True)
    for bytes_, factors, out in parts:
        pairs = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).long()
        values = _VALUES[pairs].view(len(bytes_), -1, _GROUP)
        torch.mul(values, factors.float()[..., None], out=out.view_as(values))
    return out_RC
