"""The exchange for shared experts gives the reference's rows, sums and norms, replayed for any counts.

Both sides run on one GPU, on two streams.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from plait_kernels.collective import EMPTY, ExchangeLimits, ExpertExchange, GatheredRows, PeerMemory, SentRows
from plait_kernels.collective import expert_exchange_reference as reference
from plait_kernels.moe import ExpertStack, RowParts
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu")]
GPU = torch.device("cuda", 0)
EPS, MAX_ROWS, NUM_EXPERTS = 1e-6, 300, 8
FEW_MULTIPROCESSORS = 8
"""So few that the blocks of both sides are resident together."""


@dataclass
class Side:
    """A rank on a stream of its own, with what it computes in a step."""

    exchange: ExpertExchange
    stream: torch.cuda.Stream
    held: range
    x: Tensor
    weights: Tensor
    experts: Tensor
    dense: Tensor
    residual: Tensor
    norm: Tensor

    def layer(self, num_rows: int, room: int, has_dense: bool) -> tuple[GatheredRows, RowParts, Tensor, Tensor]:
        """One layer whose experts multiply a row by their number and one."""
        rows = slice(num_rows)
        given = (self.x[rows], self.weights[rows], self.experts[rows])
        gathered = self.exchange.gather(*given, self.held, room, place=3)
        factors = (gathered.experts_GK + 1 + self.held.start).to(self.x.dtype)
        parts = (gathered.x_GD[:, None] * factors[..., None]).flatten(0, 1)
        made = RowParts(parts)
        dense = self.dense[rows] if has_dense else None
        normed, total = self.exchange.add_rms_norm(made, gathered, dense, self.residual[rows], self.norm, EPS, place=4)
        return gathered, made, normed, total


def two_sides(width: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> list[Side]:
    limits = ExchangeLimits(MAX_ROWS, width, top_k, dtype, FEW_MULTIPROCESSORS, spin_seconds=10.0)
    memories = [PeerMemory(limits.memory_bytes(2), GPU) for _ in range(2)]
    for memory in memories:
        memory.fill(EMPTY)
    addresses = [memory.address for memory in memories]
    return [side(ExpertExchange(rank, addresses, limits, GPU), rank) for rank in range(2)]


def side(exchange: ExpertExchange, rank: int) -> Side:
    limits = exchange.limits
    made = torch.randn(3, MAX_ROWS, limits.width, device=GPU, dtype=limits.dtype)
    made[:, :, 2:4] = -0.0  # the pattern of memory that nobody has written
    scores = torch.rand(MAX_ROWS, NUM_EXPERTS, device=GPU)
    weights, experts = scores.topk(limits.top_k)
    held = range(rank * NUM_EXPERTS // 2, (rank + 1) * NUM_EXPERTS // 2)
    norm = torch.rand(limits.width, device=GPU, dtype=limits.dtype)
    return Side(exchange, torch.cuda.Stream(), held, made[0], weights.contiguous(), experts, made[1], made[2], norm)


@dataclass(frozen=True)
class Counts:
    """Tokens of each side: first ones, and then others after padding, in ``num_rows`` rows."""

    first: tuple[int, int]
    second: tuple[int, int]
    second_begin: int
    num_rows: int

    def sent(self, rank: int) -> SentRows:
        counts = [first + second for first, second in zip(self.first, self.second, strict=True)]
        return SentRows(counts, self.first[rank], self.second_begin)


CASES = [
    Counts((1, 0), (0, 0), 0, 1),
    Counts((1, 1), (0, 0), 0, 1),
    Counts((0, 5), (0, 2), 10, 16),
    Counts((3, 0), (4, 16), 16, 32),
    Counts((100, 200), (100, 0), 200, 300),
    Counts((300, 300), (0, 0), 0, 300),
]


def assert_right(
    sides: Sequence[Side],
    counts: Counts,
    answers: Sequence[tuple[GatheredRows, RowParts, Tensor, Tensor]],
    has_dense: bool,
) -> None:
    rows, room = slice(counts.num_rows), counts.num_rows
    of_ranks = [(each.x[rows], each.weights[rows], each.experts[rows]) for each in sides]
    sent = [counts.sent(rank) for rank in range(2)]
    sums = []
    for each, (gathered, made, _, _) in zip(sides, answers, strict=True):
        expected = reference.gather_rows(of_ranks, sent, each.held, room)
        assert torch.equal(gathered.experts_GK, expected.experts_GK)
        is_sent = torch.zeros(2 * room, dtype=torch.bool, device=GPU)
        for rank in range(2):
            is_sent[rank * room : rank * room + sent[rank].counts_R[rank]] = True
        assert torch.equal(gathered.x_GD[is_sent], expected.x_GD[is_sent])
        assert torch.equal(gathered.weights_GK[is_sent], expected.weights_GK[is_sent])
        sums.append(
            reference.sum_of_parts(made.parts, GatheredRows(gathered.x_GD, expected.weights_GK, gathered.experts_GK))
        )
    for rank, (each, (_, _, normed, total)) in enumerate(zip(sides, answers, strict=True)):
        dense = each.dense[rows] if has_dense else None
        expected_normed, expected_total = reference.return_sums_add_rms_norm(
            sums, sent[rank], rank, dense, each.residual[rows], each.norm, EPS
        )
        torch.testing.assert_close(total, expected_total, atol=2e-2, rtol=2**-6)
        torch.testing.assert_close(normed, expected_normed, atol=2e-2, rtol=2**-5)
        assert each.exchange.lost is None


@pytest.mark.parametrize(("width", "top_k"), [(8, 1), (264, 2), (2048, 6), (7168, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_side_has_the_reference_s_rows_and_sums(width: int, top_k: int, dtype: torch.dtype) -> None:
    sides = two_sides(width, top_k, dtype)
    for number, counts in enumerate([*CASES, *reversed(CASES)]):
        has_dense = number % 2 == 0
        torch.cuda.synchronize()
        answers = []
        for rank, each in enumerate(sides):
            with torch.cuda.stream(each.stream):
                each.exchange.begin_step(counts.sent(rank))
                answers.append(each.layer(counts.num_rows, counts.num_rows, has_dense))
        torch.cuda.synchronize()
        assert_right(sides, counts, answers, has_dense)


def test_captured_layers_are_replayed_for_any_counts() -> None:
    """A graph of 64 rows and one of 300, in random order, each time for other numbers of tokens."""
    sides, order = two_sides(2048, 6), random.Random(0)
    graphs = {}
    for num_rows in (64, 300):
        for each in sides:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=each.stream):
                answer = each.layer(num_rows, num_rows, True)
            graphs[num_rows, each.held.start] = graph, answer
    for _ in range(200):
        num_rows = order.choice([64, 300])
        first = (order.randint(0, num_rows // 2), order.randint(0, num_rows // 2))
        second = (order.randint(0, num_rows // 2), order.randint(0, num_rows // 2))
        counts = Counts(first, second, num_rows // 2, num_rows)
        for each in sides:
            each.x.neg_()
        torch.cuda.synchronize()
        for rank, each in enumerate(sides):
            with torch.cuda.stream(each.stream):
                each.exchange.begin_step(counts.sent(rank))
                graphs[num_rows, each.held.start][0].replay()
        torch.cuda.synchronize()
        assert_right(sides, counts, [graphs[num_rows, each.held.start][1] for each in sides], True)


@pytest.mark.parametrize("num_rows", [1, 2, 40, 2100])
def test_parts_of_two_ranks_sum_to_what_one_rank_computes(num_rows: int) -> None:
    """By each of the kernels for experts."""
    width, hidden, top_k = 256, 512, 6
    gate_up = torch.randn(16, 2 * width, hidden, device=GPU, dtype=torch.bfloat16) / 20
    down = torch.randn(16, hidden, width, device=GPU, dtype=torch.bfloat16) / 20
    x = torch.randn(2 * num_rows, hidden, device=GPU, dtype=torch.bfloat16)
    weights, experts = torch.rand(2 * num_rows, 16, device=GPU).softmax(dim=1).topk(top_k)
    weights = weights.contiguous()
    experts[-1] = -1  # nobody sent it
    expected = ExpertStack(gate_up, down)(x[:-1], weights[:-1], experts[:-1]).float()
    total = torch.zeros(2 * num_rows - 1, hidden, device=GPU)
    for held in (range(8), range(8, 16)):
        own = torch.where((experts >= held.start) & (experts < held.stop), experts - held.start, -1)
        stack = ExpertStack(gate_up[held.start : held.stop], down[held.start : held.stop])
        made = stack.parts(x, weights, own, num_ranks=2)
        if made.is_summed:
            total += made.parts[:-1].float()
            continue
        parts = made.parts if made.index_N is None else made.parts[made.index_N]
        weighted = torch.where((own >= 0)[..., None], parts.view(2 * num_rows, top_k, hidden).float(), 0.0)
        total += (weighted * weights[..., None]).sum(dim=1)[:-1]
    torch.testing.assert_close(total, expected, atol=3e-2, rtol=3e-2)


def test_a_peer_that_never_comes_is_reported_with_rank_and_place() -> None:
    sides = two_sides(512, 2)
    lonely = sides[1]
    lonely.exchange.limit_spins(0.05)
    lonely.exchange.begin_step(SentRows([4, 4], 4, 0))
    torch.cuda.synchronize()
    with torch.cuda.stream(lonely.stream):
        lonely.exchange.gather(lonely.x[:4], lonely.weights[:4], lonely.experts[:4], lonely.held, 4, place=17)
    torch.cuda.synchronize()
    lost = lonely.exchange.lost
    assert lost is not None
    assert (lost.rank, lost.peer, lost.place) == (1, 0, 17)
    assert sides[0].exchange.lost is None
