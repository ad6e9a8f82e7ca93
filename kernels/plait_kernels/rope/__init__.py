"""Rotary position embedding (arXiv 2104.09864), the form that rotates the two halves of a head."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from plait_kernels.backends import triton_backend
from plait_kernels.kv_cache import UNSCALED, PageScales
from plait_kernels.rope import reference
from plait_kernels.rope.reference import HeadNorm, apply_rope


def rope_tables(positions_T: Tensor, frequencies_F: Tensor, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """float32 ``cos_T1D`` and ``sin_T1D`` (its first half negated), made once a step.

    Both are multiplied by ``scale``, one number or one a frequency.
    """
    backend = triton_backend(__name__, "tables_triton") if positions_T.is_cuda else reference
    cos_T1D, sin_T1D = backend.rope_tables(positions_T, frequencies_F, scale)
    return cos_T1D, sin_T1D


def rotate_heads(
    qk_THD: Tensor, num_query_heads: int, cos_T1D: Tensor, sin_T1D: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Query heads and key heads of ``qk``, normalised head by head where a norm is given, then rotated.

    ``cos`` and ``sin`` are those of ``rope_tables``; both results are in the dtype of ``qk``.
    """
    backend = backend_for(qk_THD.shape[2], is_cuda=qk_THD.is_cuda)
    q_THD, k_TGD = backend.rotate_heads(qk_THD, num_query_heads, cos_T1D, sin_T1D, norm)
    return _together(q_THD), _together(k_TGD)


def rotate_and_store(
    qkv_THD: Tensor,
    num_query_heads: int,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    norm: HeadNorm | None,
    pages: Tensor,
    slot_mapping_T: Tensor,
    scales: PageScales = UNSCALED,
) -> Tensor:
    """``rotate_heads`` of queries and keys; writes the keys and the values into the pages and returns the queries.

    ``pages`` and ``slot_mapping_T`` are those of ``plait_kernels.kv_cache.store``.
    """
    backend = backend_for(qkv_THD.shape[2], is_cuda=qkv_THD.is_cuda)
    q_THD: Tensor = backend.rotate_and_store(
        qkv_THD, num_query_heads, cos_T1D, sin_T1D, norm, pages, slot_mapping_T, scales
    )
    return _together(q_THD)


def _together(heads_THD: Tensor) -> Tensor:
    """Queries or keys as a GPU's attention reads them."""
    return heads_THD.contiguous() if heads_THD.is_cuda else heads_THD


def backend_for(head_dim: int, *, is_cuda: bool) -> ModuleType:
    """A GPU's kernel takes halves of heads that are a power of two wide; torch rotates all others."""
    return triton_backend(__name__) if is_cuda and (head_dim // 2).bit_count() == 1 else reference


__all__ = ["HeadNorm", "apply_rope", "backend_for", "rope_tables", "rotate_and_store", "rotate_heads"]
