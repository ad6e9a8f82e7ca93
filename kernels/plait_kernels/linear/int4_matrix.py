"""A matrix whose weights stay 4 bits on a GPU. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait_kernels.linear.gemm import int4_dequantise, int4_gemm
from plait_kernels.linear.int4 import Int4Weight
from plait_kernels.linear.int4_gemm_cuda import compile_for
from plait_kernels.linear.int4_tiles import tiles_of

CAPABILITY = 9
"""Of Hopper GPUs, for which the kernels were tried."""
PANEL_BYTES = 64 << 20
"""De-quantised at a time: what lies in the L2 cache is read from there."""
_PANEL_OUTPUTS = 64
"""Panels have multiples of it."""


def int4_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why GEMMs with 4-bit weights and activations of ``dtype`` do not run on a device; None if they do."""
    if dtype != torch.bfloat16:
        return f"they are multiplied with bfloat16 rows, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return "they are multiplied on a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and their kernels are for 9.0"
    return None


class Int4Matrix:
    """De-quantised inside the GEMM for up to some hundred rows, and before a bfloat16 GEMM for more."""

    def __init__(self, parts: Sequence[Int4Weight], bias_O: Tensor | None) -> None:
        """``parts`` lie one below the other, on the GPU; rows are bfloat16."""
        self.parts, self.bias_O = tuple(parts), bias_O
        self.num_outputs = sum(part.shape[0] for part in parts)
        for part in parts:
            if not part.codes.is_cuda:
                continue
            compile_for(part, tiles_of(part).values())
            _reserve(part.codes.device, panel_outputs(part) * part.num_inputs)
        # Read after that: kernels that do not compile are no tiles any more.
        self._tiles = [tiles_of(part) for part in parts]

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``."""
        out_NO = self.matmul_out(x_NI, x_NI.new_empty(x_NI.shape[0], self.num_outputs))
        return out_NO if self.bias_O is None else out_NO + self.bias_O

    def matmul_out(self, x_NI: Tensor, out_NO: Tensor) -> Tensor:
        """``x @ weight^T`` without bias, written to ``out_NO``."""
        first = 0
        for part, tiles in zip(self.parts, self._tiles, strict=True):
            num_outputs = part.shape[0]
            ordered_NI = x_NI.contiguous() if part.order_I is None else x_NI.index_select(1, part.order_I)
            own_NO = out_NO[:, first : first + num_outputs]
            if tile := tiles.get(x_NI.shape[0]):
                int4_gemm(ordered_NI, part, tile, own_NO)
            elif x_NI.shape[0]:
                dequantised_matmul(ordered_NI, part, own_NO)
            first += num_outputs
        return out_NO

    def matmul_float32(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``; rounded to bfloat16 before."""
        return self(x_NI).float()


def dequantised_matmul(x_NI: Tensor, weight: Int4Weight, out_NO: Tensor) -> Tensor:
    """``x @ weight^T``, panel by panel through the workspace."""
    (num_outputs, num_inputs), step = weight.shape, panel_outputs(weight)
    for first in range(0, num_outputs, step):
        rows = range(first, min(first + step, num_outputs))
        panel_OI = _workspace(x_NI, len(rows), num_inputs)
        int4_dequantise(weight, rows, panel_OI)
        torch.mm(x_NI, panel_OI.T, out=out_NO[:, rows.start : rows.stop])
    return out_NO


def panel_outputs(weight: Int4Weight) -> int:
    """Outputs that are de-quantised at a time."""
    num_outputs, num_inputs = weight.shape
    most = PANEL_BYTES // (2 * num_inputs) // _PANEL_OUTPUTS * _PANEL_OUTPUTS
    return min(num_outputs, max(_PANEL_OUTPUTS, most))


_workspaces: dict[torch.device, Tensor] = {}
"""bfloat16, of each GPU: matrices are multiplied one after the other on a stream."""


def _reserve(device: torch.device, num_elements: int) -> None:
    """Before any graph is captured, which holds the workspace's address."""
    if device not in _workspaces or len(_workspaces[device]) < num_elements:
        _workspaces[device] = torch.empty(num_elements, dtype=torch.bfloat16, device=device)


def _workspace(like: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    num_elements = num_outputs * num_inputs
    if like.dtype != torch.bfloat16 or not like.is_cuda:
        return like.new_empty(num_outputs, num_inputs)
    _reserve(like.device, num_elements)
    return _workspaces[like.device][:num_elements].view(num_outputs, num_inputs)


def can_multiply(weight: Int4Weight) -> bool:
    """Whether the kernels take a matrix of this shape: rows must begin at 16 bytes."""
    return weight.num_inputs % 8 == 0 and weight.shape[0] > 0
