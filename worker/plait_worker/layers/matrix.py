"""GEMMs with one rank's weights.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from plait_kernels.linear import PanelMatrix, can_hold, gemv, skinny_gemm, tiles_of
from torch import Tensor


class Matrix(Protocol):
    """A weight that is held for many GEMMs."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``x @ weight^T + bias`` of shape ``[N, O]``, in the dtype of ``x``."""
        ...

    def float32(self, x_NI: Tensor) -> Tensor:
        """The same in float32, as precise as the implementation computes."""
        ...


def matrix(weight_OI: Tensor, bias_O: Tensor | None = None) -> Matrix:
    """The fastest implementation for the weight's device and type; all accumulate in float32."""
    if weight_OI.is_cuda:
        return GpuMatrix(weight_OI, bias_O)
    if can_hold(weight_OI):
        return PanelMatrix(weight_OI, bias_O)
    packed = weight_OI.is_cpu and weight_OI.dtype == torch.bfloat16
    return _Packed(weight_OI, bias_O) if packed and _onednn_multiplies_bfloat16() else _Plain(weight_OI, bias_O)


def is_copy(held: Matrix) -> bool:
    """Whether it holds a packed copy beside the tensor that ``matrix`` was given."""
    return not isinstance(held, _Plain)


def _onednn_multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def exact_matrix(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    """``x @ weight^T`` in float32 of a float32 matrix and ``x`` of any type."""
    rounded_OI = weight_OI.bfloat16()
    if weight_OI.is_cuda and torch.equal(rounded_OI.float(), weight_OI):
        return ExactOnGpu(weight_OI, rounded_OI)
    return lambda x_NI: F.linear(x_NI.float(), weight_OI)


class ExactOnGpu:
    """Weights that bfloat16 represents exactly need no upcast: the product of two bfloat16 is exact in float32."""

    def __init__(self, weight_OI: Tensor, rounded_OI: Tensor) -> None:
        """The same weights in float32 and in bfloat16."""
        self.weight_OI, self.rounded_OI = weight_OI, rounded_OI

    def __call__(self, x_NI: Tensor) -> Tensor:
        """float32 ``[N, O]``."""
        if x_NI.dtype != torch.bfloat16:
            return F.linear(x_NI.float(), self.weight_OI)
        return torch.mm(x_NI, self.rounded_OI.T, out_dtype=torch.float32)


class _Plain:
    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight_OI, self.bias_O)

    def float32(self, x_NI: Tensor) -> Tensor:
        return self(x_NI).float()


class GpuMatrix(_Plain):
    """cuBLAS, a GEMV kernel for one row, and skinny GEMM kernels for the few rows for which they are faster."""

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

    def into(self, x_NI: Tensor, out_NO: Tensor) -> Tensor:
        """The GEMM without bias, written to ``out_NO`` of the same dtype."""
        if x_NI.shape[0] == 1:
            return gemv(x_NI, self.weight_OI, out_NO)
        if tile := self._tiles.get(x_NI.shape[0]):
            return skinny_gemm(x_NI, self.weight_OI, tile, out_NO)
        return torch.mm(x_NI, self.weight_OI.T, out=out_NO)


class _Packed:
    """A copy in oneDNN's packed order.

    ``F.linear`` packs the matrix anew at every call: that doubles the time for one row and adds a tenth for 512 rows
    (bfloat16, AVX512-BF16).
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        self.bias_O = bias_O
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        out_NO: Tensor = self.multiply(x_NI, self.packed, self.bias_O, "none", [], "")
        return out_NO

    def float32(self, x_NI: Tensor) -> Tensor:
        return self(x_NI).float()
