"""Products with a matrix in panels, by the compiled CPU kernels. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from plait_kernels.cpu import library as cpu
from plait_kernels.cpu.memory import empty

PANEL = 32
"""Outputs that lie side by side."""


class PanelMatrix:
    """A copy of a matrix in the order in which the kernels read it.

    Sums are float32, in the order of the inputs whatever the batch; bfloat16 numbers are multiplied in pairs.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """``weight_OI`` bfloat16 or float32 on the CPU; I is even in bfloat16. Raises ``ValueError`` otherwise."""
        if not can_hold(weight_OI):
            raise ValueError(
                f"a matrix {list(weight_OI.shape)} of {weight_OI.dtype} on {weight_OI.device}: the CPU kernels take "
                "bfloat16 with an even number of inputs, and float32"
            )
        self.num_outputs, self.num_inputs = weight_OI.shape
        self.dtype = weight_OI.dtype
        self._bias_O = bias_O
        self._library = cpu.library()
        weight_OI = weight_OI.contiguous()
        self._panels = empty((math.ceil(self.num_outputs / PANEL), self.num_inputs, PANEL), self.dtype)
        kind = cpu.TYPES[self.dtype]
        self._library.plait_pack(weight_OI.data_ptr(), self.num_outputs, self.num_inputs, kind, self._panels.data_ptr())
        bias = None if bias_O is None else bias_O.data_ptr()
        self.struct = cpu.Matrix(self._panels.data_ptr(), bias, self.num_outputs, self.num_inputs)
        """For kernels that do more than one product."""
        self._reference = ctypes.byref(self.struct)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``x @ weight^T + bias`` in the dtype of ``x``, which is the matrix's: ``[N, O]``."""
        return self._multiply(x_NI, self.dtype)

    def float32(self, x_NI: Tensor) -> Tensor:
        """The same, not rounded to the matrix's type."""
        return self._multiply(x_NI, torch.float32)

    def _multiply(self, x_NI: Tensor, dtype: torch.dtype) -> Tensor:
        x_NI = x_NI.contiguous()
        out_NO = torch.empty((x_NI.shape[0], self.num_outputs), dtype=dtype)
        kind, kind_out = cpu.TYPES[self.dtype], cpu.TYPES[dtype]
        self._library.plait_linear(self._reference, x_NI.data_ptr(), x_NI.shape[0], kind, kind_out, out_NO.data_ptr())
        return out_NO


def can_hold(weight_OI: Tensor) -> bool:
    """Whether the kernels are there and take this matrix."""
    even = weight_OI.dtype != torch.bfloat16 or weight_OI.shape[1] % 2 == 0
    return even and cpu.takes(weight_OI)
