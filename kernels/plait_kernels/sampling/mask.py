"""Tokens that a row may not sample, by a mask of one bit a token, in torch.

Shapes: S rows, V vocabulary, M masks, W words of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.sampling.adjust import NOT_ALLOWED

WORD_BITS = 32


def mask_logits(logits_SV: Tensor, masks_MW: Tensor, mask_S: Tensor) -> Tensor:
    """New logits ``[S, V]``: those of tokens that the row's mask does not allow are ``NOT_ALLOWED``."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits_SV.device)
    bits_SV = ((masks_MW[mask_S][:, :, None] >> shifts) & 1).flatten(1)[:, : logits_SV.shape[1]]
    return logits_SV.masked_fill(bits_SV == 0, NOT_ALLOWED)
