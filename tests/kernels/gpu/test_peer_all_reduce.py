"""The peer all-reduce gives the reference's sums and norms on every rank, bit by bit the same, replayed in any order.

Both sides run on one GPU: on two streams of a process, and in two processes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plait_kernels.collective import (
    EMPTY,
    CopiedAllReduce,
    Limits,
    PeerAllReduce,
    PeerMemory,
    add_partials_rms_norm,
    largest_logit,
)
from plait_kernels.sampling import NO_TOKEN, sample_greedy
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu")]
GPU = torch.device("cuda", 0)
EPS = 1e-6
MAX_ROWS, MAX_BLOCKS = 300, 32
"""So few blocks that those of both sides are resident together."""


@dataclass
class Side:
    """A rank on a stream of its own."""

    reduce: PeerAllReduce
    stream: torch.cuda.Stream

    def run(self, partial: Tensor, residual: Tensor, weight: Tensor, place: int = 0) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(self.stream):
            return self.reduce.add_rms_norm(partial, residual, weight, EPS, place)


def limits(width: int, dtype: torch.dtype = torch.bfloat16, spin_seconds: float = 10.0) -> Limits:
    return Limits(MAX_ROWS, width, dtype, MAX_BLOCKS, spin_seconds)


def two_sides(of: Limits, world: int = 2) -> list[Side]:
    memories = [PeerMemory(of.memory_bytes(world), GPU) for _ in range(world)]
    for memory in memories:
        memory.fill(EMPTY)
    addresses = [memory.address for memory in memories]
    return [Side(PeerAllReduce(rank, addresses, of, GPU), torch.cuda.Stream()) for rank in range(world)]


@dataclass
class Problem:
    """What each rank is given."""

    partials: list[Tensor]
    residual: Tensor
    weight: Tensor

    def assert_solved(self, answers: Sequence[tuple[Tensor, Tensor]]) -> None:
        normed, total = add_partials_rms_norm(self.partials, self.residual, self.weight, EPS)
        for given_normed, given_total in answers:
            assert torch.equal(given_total, total)
            torch.testing.assert_close(given_normed, normed, atol=0, rtol=2**-7)
            assert torch.equal(given_normed, answers[0][0])


def problem(num_rows: int, width: int, dtype: torch.dtype = torch.bfloat16, world: int = 2) -> Problem:
    made = torch.randn(world + 1, num_rows, width, device=GPU, dtype=dtype)
    made[:, :, 3] = -0.0  # two of them are the pattern of memory that nobody has written
    made[:, :, 2] = -0.0
    return Problem(list(made[:-1]), made[-1], torch.rand(width, device=GPU, dtype=dtype))


def solve(sides: Sequence[Side], of: Problem, place: int = 0) -> list[tuple[Tensor, Tensor]]:
    torch.cuda.synchronize()
    answers = [
        side.run(partial, of.residual, of.weight, place) for side, partial in zip(sides, of.partials, strict=True)
    ]
    torch.cuda.synchronize()
    return answers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 264, 2048, 2880, 4096, 7168, 16_384])
def test_every_rank_has_the_reference_s_sum_and_norm(width: int, dtype: torch.dtype) -> None:
    sides = two_sides(limits(width, dtype))
    for num_rows in (1, 2, 7, 33, 300, 64, 1, 257):
        of = problem(num_rows, width, dtype)
        of.assert_solved(solve(sides, of))
    assert all(side.reduce.lost is None for side in sides)


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_sum_in_rank_order(world: int) -> None:
    sides = two_sides(Limits(MAX_ROWS, 1024, torch.bfloat16, 16), world)
    for num_rows in (1, 40, 5):
        of = problem(num_rows, 1024, world=world)
        of.assert_solved(solve(sides, of))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_logit_is_the_reference_s_and_the_lowest_of_equals(dtype: torch.dtype) -> None:
    sides = two_sides(limits(64, dtype))
    for num_rows in (1, 33, 300):
        shards = [torch.randint(-40, 40, (num_rows, 50), device=GPU).to(dtype) for _ in sides]
        shards[0][:, 7], shards[1][:, 3] = 0.0, -0.0
        ids = find_largest(sides, shards, [50, 50])
        assert all(torch.equal(given, largest_logit(shards)) for given in ids)
        of = problem(num_rows, 64, dtype)  # the slots are as a reduction needs them
        of.assert_solved(solve(sides, of))


def test_a_rank_without_tokens_finds_the_others_largest_logit() -> None:
    sides, logits = two_sides(limits(64)), torch.randn(5, 50, device=GPU, dtype=torch.bfloat16)
    ids = find_largest(sides, [logits, logits], [50, 0])
    assert all(torch.equal(given, largest_logit([logits])) for given in ids)


def test_no_token_of_one_rank_is_no_token_of_all() -> None:
    sides, logits = two_sides(limits(64)), torch.randn(5, 50, device=GPU, dtype=torch.bfloat16)
    spoilt = logits.clone()
    spoilt[2, 7] = torch.nan
    ids = find_largest(sides, [logits, spoilt], [50, 50])
    for given in ids:
        assert (given == NO_TOKEN).tolist() == [False, False, True, False, False]


def find_largest(sides: Sequence[Side], shards: Sequence[Tensor], num_own: Sequence[int]) -> list[Tensor]:
    own, ids = [sample_greedy(shard) for shard in shards], []
    torch.cuda.synchronize()
    for rank, side in enumerate(sides):
        with torch.cuda.stream(side.stream):
            ids.append(side.reduce.largest_logit(shards[rank], own[rank], 50 * rank, num_own[rank]))
    torch.cuda.synchronize()
    assert all(side.reduce.lost is None for side in sides)
    return ids


def test_graphs_of_several_sizes_are_replayed_in_any_order() -> None:
    sides, order = two_sides(limits(4096)), random.Random(0)
    sizes = {num_rows: problem(num_rows, 4096) for num_rows in (1, 2, 16, 64, 300)}
    graphs = {num_rows: [capture(side, rank, of) for rank, side in enumerate(sides)] for num_rows, of in sizes.items()}
    for _ in range(300):
        num_rows = order.choice(list(sizes))
        of = sizes[num_rows]
        for partial in of.partials:
            partial.mul_(-1)
        torch.cuda.synchronize()
        for side, (graph, _) in zip(sides, graphs[num_rows], strict=True):
            with torch.cuda.stream(side.stream):
                graph.replay()
        torch.cuda.synchronize()
        of.assert_solved([answer for _, answer in graphs[num_rows]])
    assert all(side.reduce.lost is None for side in sides)


def capture(side: Side, rank: int, of: Problem) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side.stream):
        answer = side.reduce.add_rms_norm(of.partials[rank], of.residual, of.weight, EPS)
    return graph, answer


def test_a_long_row_of_launches_gives_what_launches_with_the_host_between_them_give() -> None:
    """20,000 reductions, each of the one before: what is pushed too early, or read too late, changes the last."""
    sides, of = two_sides(limits(256)), problem(3, 256)
    slow = of.partials
    for _ in range(20_000):
        slow = [normed for normed, _ in solve(sides, Problem(slow, of.residual, of.weight))]
    graphs = [capture_chain(side, partial, of) for side, partial in zip(sides, of.partials, strict=True)]
    torch.cuda.synchronize()
    for _ in range(1000):
        for side, graph in zip(sides, graphs, strict=True):
            with torch.cuda.stream(side.stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(side.reduce.lost is None for side in sides)
    assert torch.isfinite(slow[0]).all()
    for fast in of.partials:
        assert torch.equal(fast, slow[0])


def capture_chain(side: Side, partial: Tensor, of: Problem) -> torch.cuda.CUDAGraph:
    """20 reductions, whose last result becomes the partial sum.

    PDL makes all of them resident at once; with many more, one side would leave the other no place on the GPU.
    """
    graph, normed = torch.cuda.CUDAGraph(), partial
    with torch.cuda.graph(graph, stream=side.stream):
        for step in range(20):
            normed, _ = side.reduce.add_rms_norm(normed, of.residual, of.weight, EPS, step)
        partial.copy_(normed)
    return graph


def test_a_million_reductions_of_several_sizes_leave_both_sides_the_same() -> None:
    sides, order = two_sides(limits(4096)), random.Random(1)
    graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
    problems = {num_rows: problem(num_rows, 4096) for num_rows in (1, 2, 3, 5)}
    for num_rows, of in problems.items():
        of.partials[1].copy_(of.partials[0])
        graphs[num_rows] = [capture_chain(side, partial, of) for side, partial in zip(sides, of.partials, strict=True)]
    torch.cuda.synchronize()
    for _ in range(1_000_000 // 20):
        for side, graph in zip(sides, graphs[order.choice(list(graphs))], strict=True):
            with torch.cuda.stream(side.stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(side.reduce.lost is None for side in sides)
    for of in problems.values():
        assert torch.isfinite(of.partials[0]).all()
        assert torch.equal(*of.partials)


@dataclass
class CopyingSide:
    """A rank on a stream of its own, whose partial sums copy engines carry."""

    reduce: CopiedAllReduce
    stream: torch.cuda.Stream


def two_copying_sides(of: Limits, world: int = 2) -> list[CopyingSide]:
    memories = [PeerMemory(CopiedAllReduce.memory_bytes(of, world), GPU) for _ in range(world)]
    for memory in memories:
        memory.fill(0)
    addresses = [memory.address for memory in memories]
    return [CopyingSide(CopiedAllReduce(rank, addresses, of, GPU), torch.cuda.Stream()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("width", [264, 4096, 16_384])
def test_copied_partial_sums_are_the_reference_s_sum_and_norm(width: int, world: int) -> None:
    """Of one part, two and three, often enough to use each slot again."""
    of = dataclasses.replace(limits(width), max_rows=4500)
    sides = two_copying_sides(of, world)
    for num_rows in (1, 4500, 7, 4224, 300, 2500, 33):
        made = problem(num_rows, width, world=world)
        torch.cuda.synchronize()
        answers = []
        for rank, side in enumerate(sides):
            with torch.cuda.stream(side.stream):
                answers.append(
                    side.reduce.add_rms_norm(torch.clone, made.partials[rank], made.residual, made.weight, EPS)
                )
        torch.cuda.synchronize()
        made.assert_solved(answers)
    assert all(side.reduce.lost is None for side in sides)


def test_a_peer_whose_copy_never_comes_is_reported() -> None:
    sides, of = two_copying_sides(limits(512)), problem(4, 512)
    sides[1].reduce.limit_spins(0.05)
    sides[1].reduce.add_rms_norm(torch.clone, of.partials[1], of.residual, of.weight, EPS, place=17)
    torch.cuda.synchronize()
    lost = sides[1].reduce.lost
    assert lost is not None
    assert (lost.rank, lost.peer, lost.launch, lost.place) == (1, 0, 0, 17)
    assert sides[0].reduce.lost is None


def test_a_peer_that_never_comes_is_reported_with_rank_and_place() -> None:
    sides, of = two_sides(limits(512)), problem(4, 512)
    of.assert_solved(solve(sides, of))
    sides[1].reduce.limit_spins(0.05)
    sides[1].run(of.partials[1], of.residual, of.weight, place=17)
    torch.cuda.synchronize()
    lost = sides[1].reduce.lost
    assert lost is not None
    assert (lost.rank, lost.peer, lost.launch, lost.place) == (1, 0, 1, 17)
    assert sides[0].reduce.lost is None


def test_two_processes_on_one_gpu_open_each_other_s_memory(tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(2, str(tmp_path / "store")), nprocs=2, join=True)


def run_rank(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.cuda.set_device(GPU)
    memory = PeerMemory(limits(1024).memory_bytes(world), GPU)
    memory.fill(EMPTY)
    addresses = memory.open_all(rank, exchange(memory.handle()))
    reduce = PeerAllReduce(rank, addresses, limits(1024, spin_seconds=30), GPU)
    exchange(b"")
    for num_rows in (1, 300, 5):
        torch.manual_seed(num_rows)
        of = problem(num_rows, 1024)
        of.assert_solved([reduce.add_rms_norm(of.partials[rank], of.residual, of.weight, EPS)])
    assert reduce.lost is None
    exchange(b"")


def exchange(own: bytes) -> list[bytes]:
    given = torch.frombuffer(bytearray(own.ljust(64, b"\0")), dtype=torch.uint8)
    rows = [torch.empty_like(given) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, given)
    return [bytes(row.tolist()) for row in rows]
