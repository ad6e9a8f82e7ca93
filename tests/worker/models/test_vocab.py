"""Ranks that hold a part of the vocabulary each find the token that one rank would, and send hardly anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plait_kernels.linear import dense_matrix
from plait_kernels.sampling import NO_TOKEN
from plait_testing.rank_threads import on_every_rank
from plait_worker.layers.vocab import VocabHead
from plait_worker.parallel import Parallel

HIDDEN, ROWS = 16, 50


def head(weight_VD: torch.Tensor, parallel: Parallel) -> VocabHead:
    """This rank's rows, filled up with zeros."""
    size = -(-len(weight_VD) // parallel.world)
    filled = torch.cat((weight_VD, torch.zeros(size * parallel.world - len(weight_VD), HIDDEN)))
    return VocabHead(dense_matrix(filled[parallel.rank * size :][:size].contiguous()), len(weight_VD), parallel)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab", [3, 64, 101])
def test_the_largest_logit_of_all_ranks_is_found_and_the_lowest_id_of_equals(
    world: int, vocab: int, tmp_path: Path
) -> None:
    torch.manual_seed(vocab)
    weight = torch.randn(vocab, HIDDEN).round()  # so coarse that logits repeat
    hidden = torch.randn(ROWS, HIDDEN).round()
    hidden[0], hidden[1] = 0, -hidden[2]
    right = torch.from_numpy((hidden @ weight.T).numpy().argmax(axis=1))  # the first of equals

    def greedy(parallel: Parallel) -> torch.Tensor:
        own = head(weight, parallel)
        return own.greedy(own.shard(hidden))

    for ids in on_every_rank(world, tmp_path, greedy) if world > 1 else [greedy(Parallel())]:
        assert torch.equal(ids, right)


def test_all_logits_negative_beside_padding_of_zeros(tmp_path: Path) -> None:
    weight, hidden = -torch.rand(5, HIDDEN), torch.rand(3, HIDDEN)

    def greedy(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        own = head(weight, parallel)
        return own.greedy(own.shard(hidden)), own.whole(own.shard(hidden))

    for ids, logits in on_every_rank(4, tmp_path, greedy):
        torch.testing.assert_close(logits, hidden @ weight.T)
        assert torch.equal(ids, logits.argmax(dim=1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_row_with_nan_on_any_rank_is_no_token_on_all(world: int, tmp_path: Path) -> None:
    weight, hidden = torch.randn(64, HIDDEN), torch.randn(3, HIDDEN)

    def greedy(parallel: Parallel) -> torch.Tensor:
        own = head(weight, parallel)
        logits = own.shard(hidden)
        if parallel.rank == parallel.world - 1:
            logits[1, 9] = torch.nan
        return own.greedy(logits)

    right = (hidden @ weight.T).argmax(dim=1).tolist()
    for ids in on_every_rank(world, tmp_path, greedy) if world > 1 else [greedy(Parallel())]:
        assert ids.tolist() == [right[0], NO_TOKEN, right[2]]
