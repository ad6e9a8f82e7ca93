"""GEMV with FP8 weights by the kernel of ``fp8_gemv.cu``, compiled at its first use. Shapes: I inputs, O outputs."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from plait_kernels.linear.fp8 import Fp8Weight
from plait_kernels.linear.reference import RowNorm
from plait_kernels.nvrtc import Kernel, can_compile, compile_kernels, max_shared_bytes

_SOURCE = Path(__file__).with_name("fp8_gemv.cu")
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 4


def can_run(weight: Fp8Weight) -> bool:
    """Whether the kernel takes a matrix; Triton's does otherwise."""
    return (
        weight.stored_OI.is_cuda
        and weight.shape[1] % 16 == 0
        and weight.shape[1] <= _max_inputs(weight.stored_OI.device)
    )


def launch(
    x_1I: Tensor, norm: RowNorm | None, weight: Fp8Weight, out_1O: Tensor, sum_1I: Tensor, *, is_gated: bool
) -> None:
    """``out_1O`` from the row, or from its norm, whose sum goes to ``sum_1I``; all bfloat16 and contiguous."""
    num_outputs, num_inputs = out_1O.shape[1], x_1I.shape[1]
    device = x_1I.device
    kernel = _compiled(num_inputs, norm is not None, is_gated, weight.block_rows, device)
    num_blocks = min(-(-num_outputs // (_THREADS // 32)), _num_blocks(device))
    row_norm = norm or RowNorm(x_1I, x_1I, 0.0)
    kernel(
        (num_blocks, _THREADS, num_inputs * 2),
        *(x_1I, row_norm.residual_1I, row_norm.weight_I, weight.stored_OI, weight.scale, sum_1I, out_1O),
        *(num_outputs, float(row_norm.eps)),
        pdl=True,
    )


@functools.cache
def _max_inputs(device: torch.device) -> int:
    """In half precision in shared memory; 0 if the kernel does not run on this GPU."""
    if not can_compile() or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return (max_shared_bytes(device) - 1024) // 2


@functools.cache
def _compiled(num_inputs: int, has_norm: bool, is_gated: bool, block_rows: int, device: torch.device) -> Kernel:
    defines = [f"NUM_INPUTS={num_inputs}", f"HAS_NORM={int(has_norm)}", f"IS_GATED={int(is_gated)}"]
    return compile_kernels(_SOURCE, ["fp8_gemv"], [*defines, f"BLOCK_ROWS={block_rows}"], device)["fp8_gemv"]


@functools.cache
def _num_blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * _BLOCKS_PER_MULTIPROCESSOR
