"""Attention: the plain form that every backend is measured against, the joining of its parts, and
decode rows over pages.
"""

from __future__ import annotations

from torch import Tensor

from plait_kernels.attention import reference
from plait_kernels.attention.merge import merge, merge_into
from plait_kernels.attention.reference import PagedPrefill, RowShares, attend
from plait_kernels.backends import triton_backend
from plait_kernels.kv_cache import UNSCALED, PageScales


def decode_paged(
    q_BHD: Tensor,
    pages: Tensor,
    table_BW: Tensor,
    lengths_B: Tensor,
    scale: float,
    out_BHD: Tensor,
    scales: PageScales = UNSCALED,
    divided: RowShares | None = None,
) -> None:
    """One query token a row over the row's pages: ``out_BHD`` is written.

    ``pages`` is ``[N, 2, G, P, D]``, of the queries' dtype or float8_e4m3fn; ``table_BW`` int32 names each row's
    pages, ``lengths_B`` int32, at least 1, says how many of their tokens the row sees. Query head h reads key-value
    head ``h // (H / G)``. With ``divided``, what ``divide_rows`` made of these lengths, they are not read again.
    """
    if divided is not None:
        by_depth = triton_backend(__name__, "divided_triton")
        by_depth.decode_divided(q_BHD, pages, table_BW, divided, scale, out_BHD, scales)
    else:
        backend = triton_backend(__name__) if q_BHD.is_cuda else reference
        backend.decode_paged(q_BHD, pages, table_BW, lengths_B, scale, out_BHD, scales)


def divide_rows(
    lengths_B: Tensor, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> RowShares | None:
    """How ``decode_paged`` divides such rows by their depth, for every layer of a step.

    Without a wait: the lengths, int32, are read on the device. None for no rows or so few that each is divided alike,
    and on a CPU.
    """
    if not lengths_B.is_cuda or not len(lengths_B):
        return None
    by_depth = triton_backend(__name__, "divided_triton")
    shares: RowShares | None = by_depth.divide_rows(lengths_B, page_size, num_heads, num_kv_heads, head_dim)
    return shares


def prefill_paged(
    q_THD: Tensor, pages: Tensor, rows: PagedPrefill, scale: float, out_THD: Tensor, scales: PageScales = UNSCALED
) -> None:
    """Rows of new tokens, each of which sees all before it in its row's pages, and itself: ``out_THD`` is written.

    ``pages`` as above, and they hold the new tokens' keys and values already; ``q_THD`` has as many tokens as a row's
    end says, or more.
    """
    backend = triton_backend(__name__, "prefill_triton") if q_THD.is_cuda else reference
    backend.prefill_paged(q_THD, pages, rows, scale, out_THD, scales)


__all__ = [
    "PagedPrefill",
    "RowShares",
    "attend",
    "decode_paged",
    "divide_rows",
    "merge",
    "merge_into",
    "prefill_paged",
]
