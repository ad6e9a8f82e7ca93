"""Rope in torch. Shapes: T tokens, H heads, D dims of a head, F = D / 2 frequencies.

With ``x = [a, b]`` in halves the result is ``[a cos - b sin, b cos + a sin]``, which is
``x [cos, cos] + [b, a] [-sin, sin]``: the tables hold the bracketed factors, so that a layer needs
one roll and two multiplications.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait_kernels.kv_cache.reference import PageScales, store
from plait_kernels.norm import reference as norm_reference


class HeadNorm(NamedTuple):
    """An RMS norm of each head before rope."""

    query_D: Tensor
    """Weight of the query heads."""
    key_D: Tensor
    """Weight of the key heads."""
    eps: float


def rope_tables(positions_T: Tensor, frequencies_F: Tensor, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.rope.rope_tables``."""
    angles_TF = positions_T[:, None].float() * frequencies_F
    cos_TF, sin_TF = angles_TF.cos() * scale, angles_TF.sin() * scale
    return torch.cat((cos_TF, cos_TF), dim=-1)[:, None], torch.cat((-sin_TF, sin_TF), dim=-1)[:, None]


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """``x`` rotated, computed in float32; in the dtype of ``x``."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THD * cos_T1D, swapped_THD, sin_T1D).to(x_THD.dtype)


def rotate_heads(
    qk_THD: Tensor, num_query_heads: int, cos_T1D: Tensor, sin_T1D: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.rope.rotate_heads``."""
    q_THD, k_TGD = qk_THD[:, :num_query_heads], qk_THD[:, num_query_heads:]
    if norm is None:
        qk_THD = apply_rope(qk_THD, cos_T1D, sin_T1D)
        return qk_THD[:, :num_query_heads], qk_THD[:, num_query_heads:]
    q_THD = norm_reference.rms_norm(q_THD, norm.query_D, norm.eps)
    k_TGD = norm_reference.rms_norm(k_TGD, norm.key_D, norm.eps)
    return apply_rope(q_THD, cos_T1D, sin_T1D), apply_rope(k_TGD, cos_T1D, sin_T1D)


def rotate_and_store(
    qkv_THD: Tensor,
    num_query_heads: int,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    norm: HeadNorm | None,
    pages: Tensor,
    slot_mapping_T: Tensor,
    scales: PageScales,
) -> Tensor:
    """See ``plait_kernels.rope.rotate_and_store``."""
    num_kv_heads = pages.shape[2]
    q_THD, k_TGD = rotate_heads(qkv_THD[:, : num_query_heads + num_kv_heads], num_query_heads, cos_T1D, sin_T1D, norm)
    store(k_TGD, qkv_THD[:, -num_kv_heads:], pages, slot_mapping_T, scales)
    return q_THD
