"""Matrices packed into panels for the compiled CPU kernels. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait_kernels.cpu import library as cpu
from plait_kernels.cpu.memory import empty
from plait_kernels.linear.blocks import KINDS, BlockWeight

PANEL = 32
"""Outputs of a panel."""


class CpuMatrix:
    """A copy of a matrix in the order in which the kernels read it; ``Matrix`` says what it does."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        weights: int | None,
        kept: object,
        bias_O: Tensor | None,
        activation_bits: int = 0,
    ) -> None:
        """``shape`` is ``(O, I)``; rows and ``bias_O`` are of ``dtype``.

        ``weights`` is the address that the kernels take, in memory of ``kept``.
        """
        self.num_outputs, self.num_inputs = shape
        self.dtype = dtype
        self._kept = (kept, bias_O)
        self._library = cpu.library()
        if bias_O is not None:
            cpu.check_tensor(bias_O, dtype, self.num_outputs)
        bias = None if bias_O is None else bias_O.data_ptr()
        self.struct = cpu.Matrix(weights, bias, *shape, activation_bits)
        """For kernels that take several matrices."""
        self._reference = ctypes.byref(self.struct)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``x @ weight^T + bias`` in the dtype of ``x``, which is the matrix's: ``[N, O]``.

        Raises ``ValueError`` if ``x`` is of another dtype or width.
        """
        return self._multiply(x_NI, self.dtype)

    def matmul_float32(self, x_NI: Tensor) -> Tensor:
        """The same, not rounded to the matrix's type."""
        return self._multiply(x_NI, torch.float32)

    def _multiply(self, x_NI: Tensor, dtype: torch.dtype) -> Tensor:
        cpu.check_tensor(x_NI, self.dtype, self.num_inputs)
        x_NI = x_NI.contiguous()
        out_NO = torch.empty((x_NI.shape[0], self.num_outputs), dtype=dtype)
        kind, kind_out = cpu.TYPES[self.dtype], cpu.TYPES[dtype]
        self._library.plait_gemm(self._reference, x_NI.data_ptr(), x_NI.shape[0], kind, kind_out, out_NO.data_ptr())
        return out_NO


class PanelMatrix(CpuMatrix):
    """A dense matrix.

    Sums are float32, in the order of the inputs whatever the batch; bfloat16 elements are multiplied in pairs (VNNI).
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """``weight_OI`` bfloat16 or float32 on the CPU; I is even in bfloat16. Raises ``ValueError`` otherwise."""
        if (reason := self.unsupported_reason(weight_OI)) is not None:
            raise ValueError(f"a matrix {list(weight_OI.shape)}: the CPU kernel {reason}")
        num_outputs, num_inputs = weight_OI.shape
        weight_OI = weight_OI.contiguous()
        panels = empty((math.ceil(num_outputs / PANEL), num_inputs, PANEL), weight_OI.dtype)
        kind = cpu.TYPES[weight_OI.dtype]
        cpu.library().plait_pack_dense(weight_OI.data_ptr(), num_outputs, num_inputs, kind, panels.data_ptr())
        super().__init__((num_outputs, num_inputs), weight_OI.dtype, panels.data_ptr(), panels, bias_O)

    @staticmethod
    def unsupported_reason(weight_OI: Tensor) -> str | None:
        """Why it does not take a matrix; None if it does."""
        if not weight_OI.is_cpu or weight_OI.dtype not in cpu.TYPES:
            return f"takes bfloat16 and float32 on a CPU, not {weight_OI.dtype} on {weight_OI.device}"
        if weight_OI.dtype == torch.bfloat16 and weight_OI.shape[1] % 2:
            return f"takes bfloat16 with an even number of inputs, not {weight_OI.shape[1]}"
        return None if cpu.open_library() is not None else "is not compiled: install plait-kernels again"


class CpuBlockMatrix(CpuMatrix):
    """Quantised weights in GGUF blocks, times rows that are quantised too (``blocks.quantise_and_dequantise``).

    The dot product of inputs with a scale of their own (32; 16 in Q6_K) is exact in integers; these are summed in
    float32 in their order, whatever the batch.
    """

    def __init__(
        self, parts: Sequence[BlockWeight], bias_O: Tensor | None, dtype: torch.dtype, activation_bits: int
    ) -> None:
        """``parts`` lie one below the other, as ``blocks.join`` gives them.

        ``dtype`` of the rows and of ``bias_O``: bfloat16 or float32; ``activation_bits``: 8 or 16.
        """
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        panels = [_block_panels(part) for part in parts]
        structs = [
            cpu.BlockPanels(each.data_ptr(), each.shape[0], cpu.BLOCK_FORMATS[part.kind])
            for each, part in zip(panels, parts, strict=True)
        ]
        array = (cpu.BlockPanels * len(structs))(*structs)
        super().__init__(shape, dtype, ctypes.addressof(array), (panels, array), bias_O, activation_bits)


def _block_panels(weight: BlockWeight) -> Tensor:
    """uint8 ``[panels, bytes of a panel]``."""
    num_outputs, num_inputs = weight.shape
    kind = KINDS[weight.kind]
    panels = empty((math.ceil(num_outputs / PANEL), num_inputs // kind.inputs * PANEL * kind.panel_bytes), torch.uint8)
    raw = weight.raw.contiguous()
    number = cpu.BLOCK_FORMATS[weight.kind]
    cpu.library().plait_pack_blocks(raw.data_ptr(), num_outputs, num_inputs, number, panels.data_ptr())
    return panels


def can_pack(weight_OI: Tensor) -> bool:
    """Whether the kernels are there and take this matrix."""
    return PanelMatrix.unsupported_reason(weight_OI) is None
