"""Products with a weight matrix that is held for many calls."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.linear import reference
from plait_kernels.linear.native import PanelMatrix, can_hold
from plait_kernels.solutions import triton_solution


def multiply_row(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight^T`` of shape ``[1, O]`` in the dtype of ``x``, summed in float32: all that a single stream needs."""
    solution = triton_solution(__name__) if x_1I.is_cuda else reference
    out_1O: Tensor = solution.multiply_row(x_1I, weight_OI)
    return out_1O


__all__ = ["PanelMatrix", "can_hold", "multiply_row"]
