"""Sampling one token a row, in torch.

Shapes: S rows, V vocabulary, C candidates (the best tokens of a row, best first), B blocks, K tokens in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from plait_kernels.sampling.token_order import top_tokens

NO_TOKEN = -1
"""The token of a row without a softmax (see ``is_distribution``)."""
_BLOCK = 256
# Wide enough for most nuclei; for a row that needs more the candidates grow by this factor.
_NUCLEUS_CANDIDATES = 512
_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Filters:
    """What each row keeps of its vocabulary.

    ``top_k_S`` int64, 0 keeps all; ``top_p_S`` float32, 1 keeps all; ``min_p_S`` float32, 0 keeps all.
    """

    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor


def is_distribution(logits_SV: Tensor) -> Tensor:
    """Whether each row has a softmax, ``[S]``: none of its logits is NaN, and the largest is finite.

    The functions below are for such rows.
    """
    return logits_SV.amax(dim=-1).isfinite()


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest of equals: int64 ``[S]``.

    In two levels: torch vectorises the maximum of each block, but not argmax.
    """
    blocks_SBK = _split_into_blocks(logits_SV, padding=-torch.inf)
    block_S = blocks_SBK.amax(dim=-1).argmax(dim=-1)
    rows_S = torch.arange(logits_SV.shape[0], device=logits_SV.device)
    return block_S * _BLOCK + blocks_SBK[rows_S, block_S].argmax(dim=-1)


def sample_random(logits_SV: Tensor, temperature_S: Tensor, min_p_S: Tensor, uniform_S: Tensor) -> Tensor:
    """One token a row from softmax(logits / temperature) after min-p; no row is sorted.

    ``logits_SV`` and ``min_p_S`` float32, ``temperature_S`` float32 above 0, ``uniform_S`` float64 in [0, 1).
    Returns int64 ``[S]``. The token is the first, in vocabulary order, whose cumulative probability exceeds the
    random number.
    """
    weights_SV = _unnormalised_probs(logits_SV, temperature_S)
    return _invert_cdf(_keep_min_p(weights_SV, min_p_S), uniform_S)


def sample_filtered(logits_SV: Tensor, temperature_S: Tensor, filters: Filters, uniform_S: Tensor) -> Tensor:
    """The same after top-k, top-p and min-p; the cumulative probability runs over tokens from best to worst.

    A row keeps a prefix of its own order, which other rows' number of candidates does not change.
    """
    weights_SV = _unnormalised_probs(logits_SV, temperature_S)
    ids_SC, weights_SC = _candidates(logits_SV, weights_SV, filters)
    chosen_S = _invert_cdf(weights_SC, uniform_S)
    return ids_SC.gather(1, chosen_S[:, None]).squeeze(1)


def _unnormalised_probs(logits_SV: Tensor, temperature_S: Tensor) -> Tensor:
    """Probabilities up to a factor: the best token has weight 1."""
    best_S1 = logits_SV.amax(dim=-1, keepdim=True)
    return ((logits_SV - best_S1) / temperature_S[:, None]).exp_()


def _keep_min_p(weights_SC: Tensor, min_p_S: Tensor) -> Tensor:
    return weights_SC.masked_fill(weights_SC < min_p_S[:, None], 0.0)


def _candidates(logits_SV: Tensor, weights_SV: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Ids and weights of the tokens that may be kept, best first; the weight of a filtered token is 0."""
    vocab = logits_SV.shape[1]
    top_k_S = torch.where(filters.top_k_S == 0, vocab, filters.top_k_S.clamp(max=vocab))
    total_S = _block_mass(_split_into_blocks(weights_SV)).sum(dim=-1)
    width = _num_candidates(top_k_S, vocab)
    ids_SC, weights_SC, is_whole = _nucleus(logits_SV, weights_SV, top_k_S, total_S, filters.top_p_S, width)
    while not is_whole:
        width = min(width * _GROWTH, vocab)
        ids_SC, weights_SC, is_whole = _nucleus(logits_SV, weights_SV, top_k_S, total_S, filters.top_p_S, width)
    return ids_SC, _keep_min_p(weights_SC, filters.min_p_S)


def _num_candidates(top_k_S: Tensor, vocab: int) -> int:
    """Candidates that cover every row's top-k, and most nuclei of the rows without one."""
    limited_S = torch.where(top_k_S < vocab, top_k_S, min(_NUCLEUS_CANDIDATES, vocab))
    return int(limited_S.max())


def _nucleus(
    logits_SV: Tensor, weights_SV: Tensor, top_k_S: Tensor, total_S: Tensor, top_p_S: Tensor, width: int
) -> tuple[Tensor, Tensor, bool]:
    """Top-k and top-p over the ``width`` best tokens; the last value: whether these are all that any row keeps.

    Top-p keeps a token while the tokens before it have less than p of the mass that top-k kept.
    """
    ids_SC = top_tokens(logits_SV, width)
    in_top_k_SC = torch.arange(width, device=logits_SV.device) < top_k_S[:, None]
    weights_SC = weights_SV.gather(1, ids_SC) * in_top_k_SC
    cumulative_SC = weights_SC.cumsum(dim=-1, dtype=torch.float64)
    mass_S = torch.where(top_k_S <= width, cumulative_SC[:, -1], total_S)
    needed_S = top_p_S.to(torch.float64) * mass_S
    is_whole = (top_k_S <= width) | ((top_p_S < 1) & (cumulative_SC[:, -1] >= needed_S))
    keep_SC = ((cumulative_SC - weights_SC) < needed_S[:, None]) | (top_p_S >= 1)[:, None]
    keep_SC[:, 0] = True
    return ids_SC, weights_SC * keep_SC, bool(is_whole.all())


def _invert_cdf(weights_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds ``uniform_S`` of the whole; never one of weight 0.

    In two levels, blocks and then the tokens of one block, because a cumulative sum over the vocabulary is slow.
    """
    blocks_SBK = _split_into_blocks(weights_SV)
    cumulative_SB = _block_mass(blocks_SBK).cumsum(dim=-1)
    target_S1 = uniform_S[:, None] * cumulative_SB[:, -1:]
    block_S1 = _first_above(cumulative_SB, target_S1)
    before_S1 = torch.where(block_S1 > 0, cumulative_SB.gather(1, (block_S1 - 1).clamp(min=0)), 0.0)
    rows_S = torch.arange(weights_SV.shape[0], device=weights_SV.device)
    cumulative_SK = blocks_SBK[rows_S, block_S1.squeeze(1)].cumsum(dim=-1, dtype=torch.float64)
    inside_S1 = _first_above(cumulative_SK, target_S1 - before_S1)
    return (block_S1 * _BLOCK + inside_S1).squeeze(1)


def _first_above(cumulative_SN: Tensor, target_S1: Tensor) -> Tensor:
    """The first index above the target; if rounding leaves none, the last of nonzero weight."""
    last_S1 = (cumulative_SN < cumulative_SN[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative_SN, target_S1, right=True), last_S1)


def _split_into_blocks(values_SV: Tensor, padding: float = 0.0) -> Tensor:
    num_rows, vocab = values_SV.shape
    if vocab % _BLOCK:
        values_SV = functional.pad(values_SV, (0, -vocab % _BLOCK), value=padding)
    return values_SV.view(num_rows, -1, _BLOCK)


def _block_mass(blocks_SBK: Tensor) -> Tensor:
    # Sums over blocks do not depend on the number of rows of the call, as one sum over a row does.
    return blocks_SBK.sum(dim=-1, dtype=torch.float64)
