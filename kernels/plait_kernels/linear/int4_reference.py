"""GEMM with 4-bit weights in torch. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.linear.int4 import Int4Weight


def int4_gemm(x_NI: Tensor, weight: Int4Weight, _tile: object, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.int4_gemm``."""
    return out_NO.copy_(x_NI.float() @ weight.in_stored_order().T)


def int4_dequantise(weight: Int4Weight, rows: range, out_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.int4_dequantise``."""
    return out_OI.copy_(weight.in_stored_order()[rows.start : rows.stop])
