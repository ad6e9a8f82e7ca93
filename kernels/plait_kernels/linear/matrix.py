"""Dense weight matrices, held for many GEMMs: one class for each backend, behind one protocol.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from plait_kernels.linear.cpu import PanelMatrix
from plait_kernels.linear.gemm import MAX_ROUTER, gemv, router_gemm, router_gemv, skinny_gemm
from plait_kernels.linear.gemm_tuning import tiles_of


class Matrix(Protocol):
    """A matrix of any format that is held for many GEMMs."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``x @ weight^T + bias`` of shape ``[N, O]``, in the dtype of ``x``."""
        ...

    def matmul_float32(self, x_NI: Tensor) -> Tensor:
        """The same in float32, as precise as the backend's sums are."""
        ...


class TorchMatrix:
    """``F.linear``, which takes every device and dtype; the reference."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``."""
        return F.linear(x_NI, self.weight_OI, self.bias_O)

    def matmul_float32(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``; rounded to the dtype of ``x`` before."""
        return self(x_NI).float()

    @staticmethod
    def unsupported_reason(_weight_OI: Tensor) -> str | None:
        """None: it takes every matrix."""
        return None


class GpuMatrix(TorchMatrix):
    """cuBLAS, the GEMV kernel for one row, and the skinny GEMM for the few rows with which it is faster."""

    row_tile: ClassVar[None] = None
    """FP8 alone has tiles for one row."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__(weight_OI, bias_O)
        self._tiles = tiles_of(weight_OI) if bias_O is None else {}

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``."""
        if x_NI.shape[0] == 1 and self.bias_O is None:
            return gemv(x_NI, self.weight_OI)
        if tile := self._tiles.get(x_NI.shape[0]):
            return skinny_gemm(x_NI, self.weight_OI, tile)
        return super().__call__(x_NI)

    def matmul_out(self, x_NI: Tensor, out_NO: Tensor) -> Tensor:
        """``x @ weight^T`` without bias, written to ``out_NO`` of the same dtype."""
        if x_NI.shape[0] == 1:
            return gemv(x_NI, self.weight_OI, out_NO)
        if tile := self._tiles.get(x_NI.shape[0]):
            return skinny_gemm(x_NI, self.weight_OI, tile, out_NO)
        return torch.mm(x_NI, self.weight_OI.T, out=out_NO)

    @staticmethod
    def unsupported_reason(weight_OI: Tensor) -> str | None:
        """Why it does not take a matrix; None if it does."""
        return None if weight_OI.is_cuda else f"is for cuda, not {weight_OI.device.type}"


class OneDnnMatrix:
    """A copy in oneDNN's packed order.

    ``F.linear`` packs the matrix anew at every call: that doubles the time for one row and adds a tenth for 512 rows
    (bfloat16, AVX512-BF16).
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        self._bias_O = bias_O
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``."""
        out_NO: Tensor = self._linear(x_NI, self._packed, self._bias_O, "none", [], "")
        return out_NO

    def matmul_float32(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``; rounded to the dtype of ``x`` before."""
        return self(x_NI).float()

    @staticmethod
    def unsupported_reason(weight_OI: Tensor) -> str | None:
        """Why it does not take a matrix; None if it does."""
        if not weight_OI.is_cpu or weight_OI.dtype != torch.bfloat16:
            return f"takes bfloat16 on a CPU, not {weight_OI.dtype} on {weight_OI.device.type}"
        has_bfloat16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return None if has_bfloat16 else "has no bfloat16 on this processor"


DENSE = (GpuMatrix, PanelMatrix, OneDnnMatrix, TorchMatrix)
"""The backends of dense matrices, in the order in which they are asked."""


def dense_matrix(weight_OI: Tensor, bias_O: Tensor | None = None) -> Matrix:
    """The matrix as the first backend holds it that takes it; sums are float32 in each."""
    return next(backend for backend in DENSE if backend.unsupported_reason(weight_OI) is None)(weight_OI, bias_O)


def is_copy(held: Matrix) -> bool:
    """Whether it is a copy of the weight, beside the tensor that ``dense_matrix`` was given."""
    return not isinstance(held, TorchMatrix)


def exact_matrix(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    """``x @ weight^T`` in float32 of a float32 matrix and ``x`` of any dtype."""
    rounded_OI = weight_OI.bfloat16()
    if weight_OI.is_cuda and torch.equal(rounded_OI.float(), weight_OI):
        return ExactOnGpu(weight_OI, rounded_OI)
    return lambda x_NI: F.linear(x_NI.float(), weight_OI)


class ExactOnGpu:
    """Weights that bfloat16 represents exactly need no upcast: bfloat16 times bfloat16 is exact in float32."""

    def __init__(self, weight_OI: Tensor, rounded_OI: Tensor) -> None:
        """The same values in float32 and in bfloat16."""
        self.weight_OI, self.rounded_OI = weight_OI, rounded_OI

    def __call__(self, x_NI: Tensor) -> Tensor:
        """float32 ``[N, O]``."""
        if x_NI.dtype != torch.bfloat16:
            return F.linear(x_NI.float(), self.weight_OI)
        if x_NI.shape[0] == 1:
            return router_gemv(x_NI, self.rounded_OI)
        if all(size <= most for size, most in zip((len(x_NI), *self.rounded_OI.shape), MAX_ROUTER, strict=True)):
            return router_gemm(x_NI, self.rounded_OI)
        return torch.mm(x_NI, self.rounded_OI.T, out_dtype=torch.float32)
