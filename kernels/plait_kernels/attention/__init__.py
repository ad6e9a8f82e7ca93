"""Attention: the plain form that every backend is measured against, the joining of its parts, and
decode rows over pages.
"""

from __future__ import annotations

from torch import Tensor

from plait_kernels.attention import reference
from plait_kernels.attention.merge import merge, merge_into
from plait_kernels.attention.reference import PagedPrefill, SplitKvSchedule, attend
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
    split_kv: SplitKvSchedule | None = None,
) -> None:
    """One query token a row over the row's pages: ``out_BHD`` is written.

    ``pages`` is ``[N, 2, G, P, D]``, of the queries' dtype or float8_e4m3fn; ``table_BW`` int32 names each row's
    pages, ``lengths_B`` int32, at least 1, says how many of their tokens the row sees. Query head h reads key-value
    head ``h // (H / G)``. ``split_kv`` is what ``schedule_split_kv`` made of
    these lengths; they are then not read again.
    """
    if split_kv is not None:
        backend = triton_backend(__name__, "split_kv_triton")
        backend.decode_split_kv(q_BHD, pages, table_BW, split_kv, scale, out_BHD, scales)
    else:
        backend = triton_backend(__name__, "decode_triton") if q_BHD.is_cuda else reference
        backend.decode_paged(q_BHD, pages, table_BW, lengths_B, scale, out_BHD, scales)


def schedule_split_kv(
    lengths_B: Tensor, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> SplitKvSchedule | None:
    """The split-KV schedule of a step's decode rows, for ``decode_paged`` of every layer.

    ``lengths_B`` is int32 and is read on the device: nothing waits. None without rows, for so few rows that all get
    the same number of splits, and on a CPU.
    """
    if not lengths_B.is_cuda or not len(lengths_B):
        return None
    backend = triton_backend(__name__, "split_kv_triton")
    schedule: SplitKvSchedule | None = backend.schedule_split_kv(
        lengths_B, page_size, num_heads, num_kv_heads, head_dim
    )
    return schedule


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
    "SplitKvSchedule",
    "attend",
    "decode_paged",
    "merge",
    "merge_into",
    "prefill_paged",
    "schedule_split_kv",
]
