"""Changes of rows' logits before they are sampled, in torch: penalties, biases, and tokens that are not allowed.

Shapes: S rows, V vocabulary, R rows of counts, E listed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 20_000.0
"""No penalty takes a logit beyond this: float16 holds it, and no token falls below those that are closed."""
CLOSED = -30_000.0
"""The logit of a closed token. It is finite, so that a row of which all tokens are closed still has a softmax."""
NOT_ALLOWED = -60_000.0
"""The logit of a token that is not allowed: below those of the closed ones."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What each row changes.

    A listed token has a bias; where only listed tokens are allowed, it is one of them.
    """

    counts_RV: Tensor
    """int32: twice the times that the output has a token, and one more if the prompt has it."""
    rows_S: Tensor
    """int64: the row's counts."""
    penalties_S3: Tensor
    """float32: presence, frequency and repetition penalty."""
    ends_S: Tensor
    """int64: where the row's listed tokens end in E; they begin where those of the row before it end."""
    ids_E: Tensor
    """int64, each once in a row."""
    bias_E: Tensor
    """float32."""
    only_listed_S: Tensor
    """bool: no other tokens are allowed."""


def adjust_logits(logits_SV: Tensor, changes: Adjustments) -> Tensor:
    """New logits ``[S, V]`` of the same dtype: computed in float32 and rounded once."""
    penalised_SV = _penalise(logits_SV.float(), changes.counts_RV[changes.rows_S], changes.penalties_S3)
    adjusted_SV = penalised_SV.masked_fill(changes.only_listed_S[:, None], NOT_ALLOWED)
    counts_S = torch.diff(changes.ends_S, prepend=changes.ends_S.new_zeros(1))
    rows = torch.arange(len(counts_S), device=logits_SV.device)
    row_E = torch.repeat_interleave(rows, counts_S, output_size=len(changes.ids_E))
    listed = (row_E, changes.ids_E)
    adjusted_SV[listed] = penalised_SV[listed] + changes.bias_E
    return adjusted_SV.to(logits_SV.dtype)


def _penalise(logits_SV: Tensor, counts_SV: Tensor, penalties_S3: Tensor) -> Tensor:
    presence_S1, frequency_S1, repetition_S1 = penalties_S3.split(1, dim=1)
    num_SV = counts_SV >> 1
    repeated_SV = torch.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    lowered_SV = repeated_SV - frequency_S1 * num_SV - presence_S1 * (num_SV > 0)
    return torch.where(counts_SV != 0, lowered_SV.clamp(-MOST, MOST), logits_SV)
