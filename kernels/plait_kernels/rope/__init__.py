"""Rotary position embedding (arXiv 2104.09864) in the form that rotates the two halves of a head (GPT-NeoX)."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Call, Op, on_device
from plait_kernels.kv_cache import UNSCALED, PageScales
from plait_kernels.rope.reference import HeadNorm, apply_rope


def _is_whole(call: Call) -> str | None:
    """Only heads whose half is a power of two wide."""
    half = call.size // 2
    return None if half.bit_count() == 1 else f"takes heads whose half is a power of two wide, not {half}"


_REFERENCE = Backend("reference")
_HEADS = Backend("triton", (on_device("cuda"), _is_whole))
_rope_tables = Op(__name__, "rope_tables", Backend("tables_triton", (on_device("cuda"),)), _REFERENCE)
_rotate_heads = Op(__name__, "rotate_heads", _HEADS, _REFERENCE)
_rotate_and_store = Op(__name__, "rotate_and_store", _HEADS, _REFERENCE)
"""The size of a call is the heads' width."""


def rope_tables(positions_T: Tensor, frequencies_F: Tensor, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """float32 ``cos_T1D`` and ``sin_T1D`` (its first half negated), made once a step.

    Both are multiplied by ``scale``: one factor, or one for each frequency.
    """
    cos_T1D, sin_T1D = _rope_tables(positions_T)(positions_T, frequencies_F, scale)
    return cos_T1D, sin_T1D


def rotate_heads(
    qk_THD: Tensor, num_query_heads: int, cos_T1D: Tensor, sin_T1D: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Query heads and key heads of ``qk``, normalised by head if a norm is given, then rotated.

    ``cos`` and ``sin`` are those of ``rope_tables``; both results are in the dtype of ``qk``.
    """
    q_THD, k_TGD = _rotate_heads(qk_THD, qk_THD.shape[2])(qk_THD, num_query_heads, cos_T1D, sin_T1D, norm)
    return _contiguous(q_THD), _contiguous(k_TGD)


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
    q_THD: Tensor = _rotate_and_store(qkv_THD, qkv_THD.shape[2])(
        qkv_THD, num_query_heads, cos_T1D, sin_T1D, norm, pages, slot_mapping_T, scales
    )
    return _contiguous(q_THD)


def _contiguous(heads_THD: Tensor) -> Tensor:
    """Contiguous on a GPU, as attention needs there."""
    return heads_THD.contiguous() if heads_THD.is_cuda else heads_THD


__all__ = ["HeadNorm", "apply_rope", "rope_tables", "rotate_and_store", "rotate_heads"]
