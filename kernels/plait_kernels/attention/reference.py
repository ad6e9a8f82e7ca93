"""Causal attention, written for reading.

Shapes: T new tokens, L tokens of context and T together, H query heads, G key-value heads, D numbers in
a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float) -> Tensor:
    """Each of the last T tokens attends to itself and all before it: ``out_THD`` in the dtype of the input.

    Query head h reads key-value head ``h // (H / G)``. Give float64 for an oracle: nothing is rounded
    on the way.
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
    q_BHD: Tensor, pages: Tensor, table_BW: Tensor, lengths_B: Tensor, scale: float, out_BHD: Tensor
) -> None:
    """See ``plait_kernels.attention.decode_paged``; row by row."""
    for row, length in enumerate(lengths_B.tolist()):
        kv = pages[table_BW[row].long()].transpose(2, 3)
        k_LGD, v_LGD = (kv[:, part].flatten(0, 1)[:length] for part in (0, 1))
        out_BHD[row] = attend(q_BHD[row : row + 1], k_LGD, v_LGD, scale)[0]
