"""Attention over pages: decode rows, split-KV schedules, prefill rows, and the merge of partial results by LSE."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.attention.reference import PagedPrefill, SplitKvSchedule, attend
from plait_kernels.backends import Backend, Op, on_device
from plait_kernels.kv_cache import UNSCALED, PageScales

_REFERENCE = Backend("reference")
_SPLIT_KV, _MERGE = (Backend(module, (on_device("cuda"),)) for module in ("split_kv_triton", "merge_triton"))
_decode_paged = Op(__name__, "decode_paged", Backend("decode_triton", (on_device("cuda"),)), _REFERENCE)
_decode_split_kv = Op(__name__, "decode_split_kv", _SPLIT_KV, _REFERENCE)
_schedule_split_kv = Op(__name__, "schedule_split_kv", _SPLIT_KV, _REFERENCE)
_prefill_paged = Op(__name__, "prefill_paged", Backend("prefill_triton", (on_device("cuda"),)), _REFERENCE)
_merge = Op(__name__, "merge", _MERGE, _REFERENCE)
_merge_into = Op(__name__, "merge_into", _MERGE, _REFERENCE)


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

    On a GPU the table, lengths and schedule may be read while the kernel before still runs, which is one that writes
    pages (``kv_cache.store``, ``rope.rotate_and_store``) or comes after it: write them before that.
    """
    if split_kv is None:
        _decode_paged(q_BHD)(q_BHD, pages, table_BW, lengths_B, scale, out_BHD, scales)
    else:
        _decode_split_kv(q_BHD)(q_BHD, pages, table_BW, split_kv, scale, out_BHD, scales)


def schedule_split_kv(
    lengths_B: Tensor, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> SplitKvSchedule | None:
    """The split-KV schedule of a step's decode rows, for ``decode_paged`` of every layer.

    ``lengths_B`` is int32 and is read on the device: nothing waits. None without rows, for so few rows that all get
    the same number of splits, and on a CPU.
    """
    if not len(lengths_B):
        return None
    schedule: SplitKvSchedule | None = _schedule_split_kv(lengths_B)(
        lengths_B, page_size, num_heads, num_kv_heads, head_dim
    )
    return schedule


def prefill_paged(
    q_THD: Tensor, pages: Tensor, rows: PagedPrefill, scale: float, out_THD: Tensor, scales: PageScales = UNSCALED
) -> None:
    """Causal attention of rows of new tokens over their pages: ``out_THD`` is written.

    ``pages`` as above; they hold the new tokens' keys and values already. ``q_THD`` has at least as many tokens as the
    last row's end.
    """
    _prefill_paged(q_THD)(q_THD, pages, rows, scale, out_THD, scales)


def merge(a_THD: Tensor, lse_a_TH: Tensor, b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over both parts of a context, float32 ``[T, H, D]``, and its log-sum-exp, float32 ``[T, H]``.

    LSE is base 2, and -inf if a row sees nothing of a part; a row that sees nothing of either gets 0 and -inf. The
    input of a row that sees nothing of a part is not read.
    """
    out_THD, lse_TH = _merge(a_THD)(a_THD, lse_a_TH, b_THD, lse_b_TH)
    return out_THD, lse_TH


def merge_into(combined_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, lse_part_TH: Tensor) -> None:
    """``merge`` of what is combined so far with one more part; both are written, ``combined`` in its own dtype.

    Sums are float32. Give ``combined`` in float32 if more parts follow, so that it is rounded once.
    """
    _merge_into(combined_THD)(combined_THD, lse_TH, part_THD, lse_part_TH)


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
