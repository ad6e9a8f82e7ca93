"""Rotary position embedding (arXiv 2104.09864), the form that rotates the two halves of a head."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.kv_cache import UNSCALED, PageScales
from plait_kernels.rope import reference
from plait_kernels.rope.reference import HeadNorm, apply_rope, rope_tables
from plait_kernels.solutions import triton_solution


def rotate_heads(
    qk_THD: Tensor, num_query_heads: int, cos_T1D: Tensor, sin_T1D: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Query heads and key heads of ``qk``, normalised head by head where a norm is given, then rotated.

    ``cos`` and ``sin`` are those of ``rope_tables``; both results are in the dtype of ``qk``.
    """
    solution = triton_solution(__name__) if qk_THD.is_cuda else reference
    q_THD, k_TGD = solution.rotate_heads(qk_THD, num_query_heads, cos_T1D, sin_T1D, norm)
    return q_THD, k_TGD


def rotate_and_store(
    qkv_THD: Tensor,
    num_query_heads: int,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    norm: HeadNorm | None,
    pages: Tensor,
    place_T: Tensor,
    scales: PageScales = UNSCALED,
) -> Tensor:
    """``rotate_heads`` of queries and keys, whose keys go with the values to ``place_T`` of the pages: the queries.

    ``pages`` and ``place_T`` are those of ``plait_kernels.kv_cache.store``.
    """
    solution = triton_solution(__name__) if qkv_THD.is_cuda else reference
    q_THD: Tensor = solution.rotate_and_store(qkv_THD, num_query_heads, cos_T1D, sin_T1D, norm, pages, place_T, scales)
    return q_THD


__all__ = ["HeadNorm", "apply_rope", "rope_tables", "rotate_and_store", "rotate_heads"]
