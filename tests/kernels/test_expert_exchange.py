"""What the exchange for shared experts is held to, and what it takes; `gpu/test_expert_exchange` runs the kernels."""

import re

import pytest
import torch
from plait_kernels.collective import ExchangeLimits, SentRows, unsupported_exchange
from plait_kernels.collective import expert_exchange_reference as reference
from plait_kernels.moe import ExpertStack
from plait_kernels.norm.reference import rms_norm


def test_ranks_that_exchange_rows_compute_what_one_rank_does() -> None:
    """Three ranks with 2, 3 and 3 experts; the second has no rows of requests, the third pads between its rows."""
    width, eps, room = 16, 1e-6, 6
    gate_up, down = torch.randn(8, 48, width) / 4, torch.randn(8, width, 24) / 4
    x, dense, residual = torch.randn(3, 3, room, width).unbind()
    norm = torch.rand(width)
    weights, experts = torch.rand(3, room, 8).topk(2)
    shares = [range(2), range(2, 5), range(5, 8)]
    sent = [SentRows((6, 0, 4), *own) for own in ((6, 0), (0, 0), (1, 3))]
    sums = []
    for held in shares:
        stack = ExpertStack(gate_up[held.start : held.stop], down[held.start : held.stop])
        of_ranks = list(zip(x, weights, experts, strict=True))
        gathered = reference.gather_rows(of_ranks, sent, held, room)
        made = stack.parts(gathered.x_GD, gathered.weights_GK, gathered.experts_GK, 3)
        sums.append(reference.sum_of_parts(made.parts, gathered))
    for rank in range(3):
        index = reference.sent_index(sent[rank], rank)
        total = dense[rank] + residual[rank]
        total[index] += ExpertStack(gate_up, down)(x[rank], weights[rank], experts[rank])[index]
        given_normed, given = reference.return_sums_add_rms_norm(
            sums, sent[rank], rank, dense[rank], residual[rank], norm, eps
        )
        torch.testing.assert_close(given, total)
        torch.testing.assert_close(given_normed, rms_norm(total, norm, eps))


def test_rows_that_are_sent_follow_each_other_whatever_pads_them() -> None:
    assert reference.sent_index(SentRows((5,), 2, 16), 0).tolist() == [0, 1, 16, 17, 18]
    assert reference.sent_index(SentRows((0,), 0, 4), 0).tolist() == []


@pytest.mark.parametrize(
    ("world", "width", "top_k", "dtype", "reason"),
    [
        (9, 4096, 6, torch.bfloat16, "takes up to 8 ranks, not 9"),
        (2, 4096, 6, torch.float32, r"takes bfloat16 or float16, not torch\.float32"),
        (2, 4100, 6, torch.bfloat16, "takes widths that are a multiple of 8 up to 16384, not 4100"),
        (2, 4096, 17, torch.bfloat16, "takes up to 16 experts a token, not 17"),
    ],
)
def test_what_nccl_has_to_exchange_is_named(
    world: int, width: int, top_k: int, dtype: torch.dtype, reason: str
) -> None:
    assert re.search(reason, unsupported_exchange(world, width, top_k, dtype) or "")


def test_memory_holds_rows_with_ids_and_weights_and_sums_of_each_peer() -> None:
    limits = ExchangeLimits(max_rows=100, width=2048, top_k=6, dtype=torch.bfloat16, num_multiprocessors=132)
    assert limits.memory_bytes(2) == 100 * (2048 * 2 + 6 * 8 + 2048 * 2)
    assert limits.memory_bytes(4) == 3 * limits.memory_bytes(2)
