"""The exchange of replicas that share their experts, of all ranks at once, in torch.

Shapes: as in ``plait_kernels.collective.expert_exchange``; N rows that a rank sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait_kernels.collective.expert_exchange import GatheredRows, SentRows
from plait_kernels.norm.reference import rms_norm


def sent_index(sent: SentRows, rank: int) -> Tensor:
    """int64 ``[N]``: which of its rows the rank sends."""
    count = sent.counts_R[rank]
    second = range(sent.second_begin, sent.second_begin + count - sent.num_first)
    return torch.tensor([*range(min(count, sent.num_first)), *second], dtype=torch.int64)


def gather_rows(
    of_ranks: Sequence[tuple[Tensor, Tensor, Tensor]], sent_R: Sequence[SentRows], held: range, room: int
) -> GatheredRows:
    """From every rank's rows, weights and ids: what the rank that holds these experts is given."""
    (x_TD, weights_TK, experts_TK), world = of_ranks[0], len(of_ranks)
    x_GD = x_TD.new_zeros(world * room, x_TD.shape[1])
    weights_GK = weights_TK.new_zeros(world * room, weights_TK.shape[1])
    experts_GK = experts_TK.new_full((world * room, experts_TK.shape[1]), -1)
    for rank, (x, weights, experts) in enumerate(of_ranks):
        index_N = sent_index(sent_R[rank], rank).to(x.device)
        rows = slice(rank * room, rank * room + len(index_N))
        x_GD[rows], weights_GK[rows] = x[index_N], weights[index_N]
        is_held = (experts[index_N] >= held.start) & (experts[index_N] < held.stop)
        experts_GK[rows] = torch.where(is_held, experts[index_N] - held.start, -1)
    return GatheredRows(x_GD, weights_GK, experts_GK)


def sum_of_parts(parts_ND: Tensor, gathered: GatheredRows) -> Tensor:
    """float32 ``[G, D]``: a rank's weighted sum of the parts of its experts, ``[G K, D]``."""
    num_rows, top_k = gathered.experts_GK.shape
    parts_GKD = parts_ND.view(num_rows, top_k, -1).float()
    is_held_GK1 = (gathered.experts_GK >= 0)[..., None]
    weighted_GKD = torch.where(is_held_GK1, parts_GKD * gathered.weights_GK[..., None], 0.0)
    return weighted_GKD.sum(dim=1)


def return_sums_add_rms_norm(
    sums_RGD: Sequence[Tensor],
    sent: SentRows,
    rank: int,
    dense_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What rank ``rank`` gets of every rank's float32 sums: others' are rounded on their way, its own are not."""
    room = len(sums_RGD[0]) // len(sums_RGD)
    index_N = sent_index(sent, rank).to(residual_TD.device)
    total_TD = torch.zeros_like(residual_TD, dtype=torch.float32)
    if dense_TD is not None:
        total_TD = total_TD + dense_TD.float()
    for source, sums_GD in enumerate(sums_RGD):
        own_ND = sums_GD[rank * room : rank * room + len(index_N)]
        total_TD[index_N] += own_ND if source == rank else own_ND.to(residual_TD.dtype).float()
    rounded_TD = (total_TD + residual_TD.float()).to(residual_TD.dtype)
    return rms_norm(rounded_TD, weight_D, eps), rounded_TD
