"""GEMM and GEMV with weights of every format; one protocol for the matrices that hold them."""

from plait_kernels.linear.blocks import BlockWeight
from plait_kernels.linear.cpu import CpuBlockMatrix, CpuMatrix, PanelMatrix, can_pack
from plait_kernels.linear.fp8 import Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_matrix import Fp8Matrix, fp8_unsupported_reason, silu_mul_matmul
from plait_kernels.linear.gemm import (
    add_rms_norm_quantise,
    fp8_gate_up_silu,
    fp8_gemm,
    gate_up_silu,
    gemv,
    int4_dequantise,
    int4_gemm,
    quantise_rows,
    rmsnorm_gate_up_silu,
    rmsnorm_gemv,
    rmsnorm_quantise,
    rmsnorm_router_gemv,
    router_gemm,
    router_gemv,
    silu_mul_quantise,
    skinny_gemm,
)
from plait_kernels.linear.gemm_tuning import Tile, tiles_for, tiles_of, tuning_file
from plait_kernels.linear.int4 import Int4Weight
from plait_kernels.linear.int4_matrix import Int4Matrix, int4_unsupported_reason
from plait_kernels.linear.matrix import (
    DENSE,
    ExactOnGpu,
    GpuMatrix,
    Matrix,
    dense_matrix,
    exact_matrix,
    is_copy,
)
from plait_kernels.linear.reference import RowNorm

__all__ = [
    "DENSE",
    "BlockWeight",
    "CpuBlockMatrix",
    "CpuMatrix",
    "ExactOnGpu",
    "Fp8Matrix",
    "Fp8Rows",
    "Fp8Weight",
    "GpuMatrix",
    "Int4Matrix",
    "Int4Weight",
    "Matrix",
    "PanelMatrix",
    "RowNorm",
    "Tile",
    "add_rms_norm_quantise",
    "can_pack",
    "dense_matrix",
    "exact_matrix",
    "fp8_gate_up_silu",
    "fp8_gemm",
    "fp8_unsupported_reason",
    "gate_up_silu",
    "gemv",
    "int4_dequantise",
    "int4_gemm",
    "int4_unsupported_reason",
    "is_copy",
    "quantise_rows",
    "rmsnorm_gate_up_silu",
    "rmsnorm_gemv",
    "rmsnorm_quantise",
    "rmsnorm_router_gemv",
    "router_gemm",
    "router_gemv",
    "silu_mul_matmul",
    "silu_mul_quantise",
    "skinny_gemm",
    "tiles_for",
    "tiles_of",
    "tuning_file",
]
