"""The order of a vocabulary by logit, the same on every device and in every batch.

Shapes: S rows, V vocabulary, C the best tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_tokens(logits_SV: Tensor, num_best: int) -> Tensor:
    """Ids of the ``num_best`` largest logits, best first, ties by the lower id: int64 ``[S, C]``.

    ``logits_SV`` is float32. torch leaves open which of equal values ``topk`` and an unstable sort give, and logits
    from bfloat16 tie often; the keys below are all different.
    """
    keys_SV = _sort_keys(logits_SV)
    vocab = logits_SV.shape[1]
    if num_best < vocab:
        keys_SC = torch.topk(keys_SV, num_best, dim=-1).values
    else:
        keys_SC = torch.sort(keys_SV, dim=-1, descending=True).values
    return (vocab - 1) - (keys_SC & 0xFFFFFFFF)


def _sort_keys(logits_SV: Tensor) -> Tensor:
    # The bits of a float, with those below the sign flipped if it is negative, order like the float itself.
    # Adding 0 makes -0 equal to 0.
    bits_SV = (logits_SV + 0.0).view(torch.int32)
    ordered_SV = bits_SV ^ ((bits_SV >> 31) & 0x7FFFFFFF)
    reversed_ids_V = torch.arange(logits_SV.shape[1] - 1, -1, -1, device=logits_SV.device)
    return (ordered_SV.long() << 32) | reversed_ids_V
