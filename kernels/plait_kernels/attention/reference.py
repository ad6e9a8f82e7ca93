"""Attention in torch, written for reading.

Shapes: T new tokens, L tokens of context and T together, H query heads, G key-value heads, D dims of
a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait_kernels.kv_cache.reference import PageScales, as_bytes


class PagedPrefill(NamedTuple):
    """P rows of new tokens over pages; tensors on the device."""

    ends_q: Tensor
    """int32 ``[P + 1]``: new tokens before each row."""
    kv_P: Tensor
    """int32: positions that each row's last token sees; a row without new tokens may have any."""
    table_PW: Tensor
    """int32: each row's pages."""


class SplitKvSchedule(NamedTuple):
    """Split-KV decode: which split of which row each slot takes, and the workspace for partial results.

    J slots, G key-value heads, H query heads, D dims of a head.
    """

    splits_J4: Tensor
    """int32: row, index of the split, number of splits of the row, KV length; the row is -1 in an empty slot."""
    num_done_JG: Tensor
    """int32, in the slot of a row's first split: finished splits; 0 between calls."""
    partial_JHD: Tensor
    """float32: attention over one split."""
    lse_JH: Tensor
    """float32: its log-sum-exp, base 2."""


def attend(q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T tokens: ``out_THD`` in the dtype of the input.

    Query head h reads key-value head ``h // (H / G)``. In float64 it is the oracle: nothing is rounded
    in between.
    """
    num_new, num_heads, _ = q_THD.shape
    group = num_heads // k_LGD.shape[1]
    k_LHD, v_LHD = (x.repeat_interleave(group, dim=1) for x in (k_LGD, v_LGD))
    scores_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) * scale
    positions_L = torch.arange(k_LGD.shape[0], device=q_THD.device)
    hidden_TL = positions_L > positions_L[-num_new:, None]
    weights_HTL = scores_HTL.masked_fill(hidden_TL, float("-inf")).softmax(dim=-1)
    return torch.einsum("htl,lhd->thd", weights_HTL, v_LHD)


def decode_paged(
    q_BHD: Tensor,
    pages: Tensor,
    table_BW: Tensor,
    lengths_B: Tensor,
    scale: float,
    out_BHD: Tensor,
    scales: PageScales,
) -> None:
    """See ``plait_kernels.attention.decode_paged``; row by row."""
    for row, length in enumerate(lengths_B.tolist()):
        k_LGD, v_LGD = _context(pages, table_BW[row], length, scales, q_BHD.dtype)
        out_BHD[row] = attend(q_BHD[row : row + 1], k_LGD, v_LGD, scale)[0]


def decode_split_kv(
    q_BHD: Tensor,
    pages: Tensor,
    table_BW: Tensor,
    schedule: SplitKvSchedule,
    scale: float,
    out_BHD: Tensor,
    scales: PageScales,
) -> None:
    """``decode_paged`` of the schedule's rows; their splits make no difference."""
    lengths_B = torch.zeros(len(q_BHD), dtype=torch.int32)
    for row, _, _, length in schedule.splits_J4.tolist():
        if row >= 0:
            lengths_B[row] = length
    decode_paged(q_BHD, pages, table_BW, lengths_B, scale, out_BHD, scales)


def prefill_paged(
    q_THD: Tensor, pages: Tensor, rows: PagedPrefill, scale: float, out_THD: Tensor, scales: PageScales
) -> None:
    """See ``plait_kernels.attention.prefill_paged``; row by row."""
    ends = rows.ends_q.tolist()
    for row, length in enumerate(rows.kv_P.tolist()):
        begin, end = ends[row], ends[row + 1]
        if begin < end:
            k_LGD, v_LGD = _context(pages, rows.table_PW[row], length, scales, q_THD.dtype)
            out_THD[begin:end] = attend(q_THD[begin:end], k_LGD, v_LGD, scale)


def _context(
    pages: Tensor, table_W: Tensor, length: int, scales: PageScales, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[length, G, D]`` of one row, times their scales."""
    kv = as_bytes(pages)[table_W.long()].view(pages.dtype).to(dtype).transpose(2, 3)
    k_LGD, v_LGD = (kv[:, part].flatten(0, 1)[:length] * factor for part, factor in enumerate(scales))
    return k_LGD, v_LGD


def schedule_split_kv(
    _lengths_B: Tensor, _page_size: int, _num_heads: int, _num_kv_heads: int, _head_dim: int
) -> SplitKvSchedule | None:
    """None: ``decode_paged`` computes row by row."""
    return None


def merge(a_THD: Tensor, lse_a_TH: Tensor, b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.attention.merge``."""
    top_TH = torch.maximum(lse_a_TH, lse_b_TH)
    # With two empty parts the difference would be inf - inf.
    shift_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_a_TH, weight_b_TH = (lse_a_TH - shift_TH).exp2(), (lse_b_TH - shift_TH).exp2()
    total_TH = weight_a_TH + weight_b_TH
    sum_THD = _scale_by_weight(a_THD, weight_a_TH) + _scale_by_weight(b_THD, weight_b_TH)
    return sum_THD / total_TH.masked_fill(total_TH == 0, 1.0)[..., None], shift_TH + total_TH.log2()


def merge_into(combined_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, lse_part_TH: Tensor) -> None:
    """See ``plait_kernels.attention.merge_into``."""
    sum_THD, sum_TH = merge(combined_THD, lse_TH, part_THD, lse_part_TH)
    combined_THD.copy_(sum_THD)
    lse_TH.copy_(sum_TH)


def _scale_by_weight(part_THD: Tensor, weight_TH: Tensor) -> Tensor:
    """0 where the weight is 0, even times NaN."""
    weight_TH1 = weight_TH[..., None]
    return (part_THD.float() * weight_TH1).masked_fill(weight_TH1 == 0, 0.0)
