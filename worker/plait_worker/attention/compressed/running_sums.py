"""Softmaxes over a block's tokens, a channel at a time, as sums that any chunk may begin, continue or close.

Of a channel's tokens the largest logit, the sum of exponentials and the weighted sum of values are kept: two such
triples merge into that of both. The empty one is (-inf, 0, 0).

Shapes: T tokens, S runs of a row's tokens in one block, C those that close it, N slots, K channels; with overlap the
first half of them (a) goes into the next block's entry and the second (b) into its own. A sum is ``[3, K]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_worker.attention.compressed.row_lists import BlockLists
from plait_worker.slot_state import LayerState


def close_blocks(values_TK: Tensor, logits_TK: Tensor, blocks: BlockLists, state: LayerState) -> Tensor:
    """The entries of the blocks that close in this step, float32 ``[C, K]``, or ``[C, K / 2]`` with overlap.

    Updates the slots' sums, and writes those that snapshots keep.
    """
    sums_S3K = _merge(_before(blocks, state), _run_sums(values_TK, logits_TK, blocks))
    half = state.last.shape[2]
    closed_C3K = _with_last_block(sums_S3K, blocks, state, half) if half else sums_S3K[blocks.closed_C]
    if half:
        state.last.index_copy_(0, blocks.last.target, sums_S3K[blocks.last.source, :, :half])
        state.saved_last.index_copy_(0, blocks.saved.target, sums_S3K[blocks.saved.source, :, :half])
    state.sums.index_copy_(0, blocks.open.target, sums_S3K[blocks.open.source])
    return closed_C3K[:, 2] / closed_C3K[:, 1]


def _before(blocks: BlockLists, state: LayerState) -> Tensor:
    """What earlier steps summed of each run's block."""
    return _empty_unless(blocks.continues_S, state.sums[blocks.slots_S])


def _run_sums(values_TK: Tensor, logits_TK: Tensor, blocks: BlockLists) -> Tensor:
    """Of the step's own tokens."""
    if blocks.is_single:
        return torch.stack((logits_TK, torch.ones_like(logits_TK), values_TK), dim=1)
    lengths_S = blocks.lengths_S
    largest_SK = torch.segment_reduce(logits_TK, "max", lengths=lengths_S, axis=0)
    weights_TK = (logits_TK - largest_SK.repeat_interleave(lengths_S, dim=0)).exp_()
    total_SK = torch.segment_reduce(weights_TK, "sum", lengths=lengths_S, axis=0)
    weighted_SK = torch.segment_reduce(weights_TK.mul_(values_TK), "sum", lengths=lengths_S, axis=0)
    return torch.stack((largest_SK, total_SK, weighted_SK), dim=1)


def _with_last_block(sums_S3K: Tensor, blocks: BlockLists, state: LayerState, half: int) -> Tensor:
    """The closed blocks' own halves with the other halves of the blocks before them."""
    known = torch.cat((sums_S3K[:, :, :half], state.last))
    prior_C3K = _empty_unless(blocks.has_prior_C, known[blocks.prior_C])
    return _merge(prior_C3K, sums_S3K[blocks.closed_C, :, half:])


def _merge(one_S3K: Tensor, other_S3K: Tensor) -> Tensor:
    """Of both; the second is not empty."""
    largest_SK = torch.maximum(one_S3K[:, 0], other_S3K[:, 0])
    merged_S3K = torch.empty_like(one_S3K)
    merged_S3K[:, 0] = largest_SK
    one_SK, other_SK = (one_S3K[:, 0] - largest_SK).exp_(), (other_S3K[:, 0] - largest_SK).exp_()
    torch.add(one_S3K[:, 1:] * one_SK[:, None], other_S3K[:, 1:] * other_SK[:, None], out=merged_S3K[:, 1:])
    return merged_S3K


def _empty_unless(is_there_S: Tensor, sums_S3K: Tensor) -> Tensor:
    """The sums, or empty ones."""
    empty_3 = sums_S3K.new_tensor((-torch.inf, 0.0, 0.0))
    return torch.where(is_there_S[:, None, None], sums_S3K, empty_3[:, None])
