"""Log-probabilities of chosen tokens and of the best ones, under the model's own distribution.

Shapes: S rows, V vocabulary, K best tokens, G given ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.sampling.token_order import top_tokens


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of one chosen token a row, and of the best ones.

    ``logprob_S`` float32; ``rank_S`` int64 from 1; ``best_ids_SK`` int64 and ``best_logprobs_SK`` float32, best first.
    """

    logprob_S: Tensor
    rank_S: Tensor
    best_ids_SK: Tensor
    best_logprobs_SK: Tensor
    given_logprobs_SG: Tensor | None = None
    """float32, of the tokens that were given besides."""


def score_tokens(logits_SV: Tensor, ids_S: Tensor, num_best: int, given_SG: Tensor | None = None) -> TokenScores:
    """Scores of ``ids_S`` (int64) under softmax of ``logits_SV`` (float32), with the ``num_best`` best tokens.

    ``given_SG`` int64 are further tokens of each row whose log-probabilities are wanted.

    Equal logits rank by the lower id, so that the greedy token always has rank 1.
    """
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
    chosen_S1 = ids_S[:, None]
    best_ids_SK = top_tokens(logits_SV, num_best) if num_best > 0 else chosen_S1[:, :0]
    return TokenScores(
        logprob_S=logprobs_SV.gather(1, chosen_S1).squeeze(1),
        rank_S=_rank(logits_SV, chosen_S1),
        best_ids_SK=best_ids_SK,
        best_logprobs_SK=logprobs_SV.gather(1, best_ids_SK),
        given_logprobs_SG=None if given_SG is None else logprobs_SV.gather(1, given_SG),
    )


def _rank(logits_SV: Tensor, chosen_S1: Tensor) -> Tensor:
    chosen_logit_S1 = logits_SV.gather(1, chosen_S1)
    ids_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    is_tie_before_SV = (logits_SV == chosen_logit_S1) & (ids_V < chosen_S1)
    return ((logits_SV > chosen_logit_S1) | is_tie_before_SV).sum(dim=-1) + 1
