"""GEMM and GEMV with weights of every format; one protocol for the matrices that hold them."""

from plait_kernels.linear.cpu import CpuMatrix, GgufMatrix, PanelMatrix, can_pack
from plait_kernels.linear.gemm import (
    gate_up_silu,
    gemv,
    rmsnorm_gate_up_silu,
    rmsnorm_gemv,
    rmsnorm_router_gemv,
    skinny_gemm,
)
from plait_kernels.linear.gemm_tuning import Tile, tiles_for, tiles_of, tuning_file
from plait_kernels.linear.gguf import GgufWeight
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
    "CpuMatrix",
    "ExactOnGpu",
    "GgufMatrix",
    "GgufWeight",
    "GpuMatrix",
    "Matrix",
    "PanelMatrix",
    "RowNorm",
    "Tile",
    "can_pack",
    "dense_matrix",
    "exact_matrix",
    "gate_up_silu",
    "gemv",
    "is_copy",
    "rmsnorm_gate_up_silu",
    "rmsnorm_gemv",
    "rmsnorm_router_gemv",
    "skinny_gemm",
    "tiles_for",
    "tiles_of",
    "tuning_file",
]
