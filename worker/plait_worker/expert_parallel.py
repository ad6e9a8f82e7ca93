"""Expert parallelism: all ranks of a group of replicas, each of which holds whole experts.

A replica computes attention and dense parts for its own tokens. A layer's experts run over the tokens of all replicas:
rows are gathered, each rank computes its experts' sums, and the sums go back to the ranks that sent the rows. Only rows
of requests are sent. What each replica sends is in the group's decision, so that no rank waits for a count. Over peers'
memory (``plait_kernels.collective.ExpertExchange``) the GPU reads the counts, which CUDA graphs need.

Shapes: T rows of this replica, N of them sent by this rank, G rows of all ranks, D the hidden size, K experts a token,
B bytes of a row, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from plait_kernels.collective import SentRows
from plait_kernels.moe import Experts, ExpertStack, Fp8Experts, Int4Experts
from torch import Tensor

from plait_worker.errors import ensure
from plait_worker.parallel import Parallel, all_gather_single, collective
from plait_worker.peers import Peers
from plait_worker.rank_sums import RankSums, Summand

# Its name before torch 2.13.
_reduce_scatter_single: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_ID_BYTES, _WEIGHT_BYTES = 4, 4
"""Of an expert's id and its weight in a row."""
_NOBODY = 0xFF
"""Every byte of a padding row: its ids are -1, which no rank holds."""


class Exchange(Protocol):
    """How rows travel between the ranks of a group; ``counts_R`` rows of each."""

    def gather(self, rows_NB: Tensor, counts_R: Sequence[int]) -> Tensor:
        """The ranks' rows, uint8 ``[G, B]``, in rank order; padding rows hold ``_NOBODY`` bytes."""
        ...

    def reduce_scatter(self, partial_GD: Tensor, counts_R: Sequence[int]) -> Tensor:
        """This rank's rows of the ranks' sum, ``[N, D]``; ``partial_GD`` has the rows of ``gather``."""
        ...


class ExactExchange:
    """Sends rows of requests and nothing else, in pairs of ranks; for gloo."""

    def __init__(self, ranks: Parallel) -> None:
        """All ranks of the group."""
        self._ranks = ranks

    def gather(self, rows_NB: Tensor, counts_R: Sequence[int]) -> Tensor:
        """See ``Exchange``."""
        out = rows_NB.new_empty(sum(counts_R), rows_NB.shape[1])
        self._all_to_all(out.split(list(counts_R)), [rows_NB] * self._ranks.world)
        return out

    def reduce_scatter(self, partial_GD: Tensor, counts_R: Sequence[int]) -> Tensor:
        """See ``Exchange``; the sum is float32, in rank order."""
        num_own = counts_R[self._ranks.rank]
        parts_RND = partial_GD.new_empty(self._ranks.world, num_own, partial_GD.shape[1])
        self._all_to_all(parts_RND.unbind(), partial_GD.contiguous().split(list(counts_R)))
        return parts_RND.float().sum(dim=0).to(partial_GD.dtype)

    def _all_to_all(self, received_R: Sequence[Tensor], sent_R: Sequence[Tensor]) -> None:
        """By messages, of which there is none without rows: gloo's own waits for ever for empty ones."""
        own = self._ranks.rank
        received_R[own].copy_(sent_R[own])
        collective(lambda: self._exchange_messages(received_R, sent_R))

    def _exchange_messages(self, received_R: Sequence[Tensor], sent_R: Sequence[Tensor]) -> None:
        own, group = self._ranks.rank, self._ranks.group
        others = [rank for rank in range(self._ranks.world) if rank != own]
        receiving = [
            dist.irecv(received_R[rank], group=group, group_src=rank) for rank in others if len(received_R[rank])
        ]
        sending = [dist.isend(sent_R[rank], group=group, group_dst=rank) for rank in others if len(sent_R[rank])]
        for message in (*receiving, *sending):
            if message is not None:
                message.wait()


class PaddedExchange:
    """All-gather and reduce-scatter of as many rows a rank as the longest has; for NCCL."""

    def __init__(self, ranks: Parallel) -> None:
        """All ranks of the group."""
        self._ranks = ranks

    def gather(self, rows_NB: Tensor, counts_R: Sequence[int]) -> Tensor:
        """See ``Exchange``."""
        padded = torch.full((max(counts_R), rows_NB.shape[1]), _NOBODY, dtype=torch.uint8, device=rows_NB.device)
        padded[: len(rows_NB)] = rows_NB
        out = padded.new_empty(self._ranks.world * len(padded), padded.shape[1])
        collective(lambda: all_gather_single(out, padded, group=self._ranks.group))
        return out

    def reduce_scatter(self, partial_GD: Tensor, counts_R: Sequence[int]) -> Tensor:
        """See ``Exchange``."""
        out = partial_GD.new_empty(max(counts_R), partial_GD.shape[1])
        collective(lambda: _reduce_scatter_single(out, partial_GD, group=self._ranks.group))
        return out[: counts_R[self._ranks.rank]]


def exchange_for(device_type: str, ranks: Parallel) -> Exchange:
    """For NCCL on GPUs, for gloo on CPUs."""
    return PaddedExchange(ranks) if device_type == "cuda" and ranks.world > 1 else ExactExchange(ranks)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Who sends which rows in a step."""

    counts_R: Sequence[int]
    """Rows of each rank."""
    own: range
    """This rank's, of its replica's."""


@dataclass(frozen=True, slots=True)
class ReplicaRows:
    """Where a replica's tokens are among the rows of a step, of which others are padding."""

    num_first: int
    """The first rows are tokens, so many,"""
    second_begin: int = 0
    """and so are, from here on,"""
    num_second: int = 0
    """so many."""


class ExpertParallel:
    """One rank of a group of replicas that share their experts."""

    def __init__(self, ranks: Parallel, replica: int, num_replicas: int, exchange: Exchange) -> None:
        """``ranks`` are those of all replicas, in order."""
        self.ranks = ranks
        self.replica = replica
        self.num_replicas = num_replicas
        self.peers = Peers()
        self._exchange = exchange
        self._tokens: Sequence[int] | None = None
        self._step: tuple[int, StepRows] | None = None
        """For this number of rows of the replica."""

    def begin_step(self, num_tokens: Sequence[int] | None, own: ReplicaRows | None = None) -> None:
        """Tokens of each replica in the step that follows; None if each has as many rows as this one.

        ``own`` are this replica's, which the exchange over peers' memory needs.
        Raises ``WorkerError`` if they are not one number for each replica.
        """
        ensure(
            num_tokens is None or len(num_tokens) == self.num_replicas,
            f"the decision counts the tokens of {len(num_tokens or ())} replicas; the group has {self.num_replicas}",
        )
        self._tokens, self._step = num_tokens, None
        if self.peers.exchange is None or own is None:
            return
        num_own = own.num_first + own.num_second
        counts = [num_own] * self.num_replicas if num_tokens is None else num_tokens
        ensure(
            counts[self.replica] == num_own,
            f"the decision counts {counts[self.replica]} tokens of this replica, and its plan has {num_own}",
        )
        self.peers.exchange.begin_step(SentRows(counts, own.num_first, own.second_begin))

    def own_experts(self, num_experts: int) -> range:
        """The experts that this rank holds; shares differ by one at most."""
        return _share(num_experts, self.ranks.rank, self.ranks.world)

    def rows(self, num_rows: int) -> StepRows:
        """Of the step, in which this replica computes ``num_rows`` with dummies. Its ranks divide the others evenly."""
        if self._step is None or self._step[0] != num_rows:
            self._step = num_rows, self._divide(num_rows)
        return self._step[1]

    def room(self, num_rows: int) -> int:
        """The most rows that a rank sends, if this replica computes ``num_rows``."""
        return num_rows if self._tokens is None else max(self._tokens)

    def _divide(self, num_rows: int) -> StepRows:
        tokens = self._tokens if self._tokens is not None else [num_rows] * self.num_replicas
        world = self.ranks.world // self.num_replicas
        ensure(tokens[self.replica] <= num_rows, "the decision counts more tokens of this replica than its plan has")
        counts = [len(_share(num, rank, world)) for num in tokens for rank in range(world)]
        return StepRows(counts, _share(tokens[self.replica], self.ranks.rank % world, world))

    def gather(self, rows_NB: Tensor, step: StepRows) -> Tensor:
        """See ``Exchange``."""
        return self._exchange.gather(rows_NB, step.counts_R)

    def reduce_scatter(self, partial_GD: Tensor, step: StepRows) -> Tensor:
        """See ``Exchange``."""
        return self._exchange.reduce_scatter(partial_GD, step.counts_R)


class GroupExperts:
    """A layer's experts over the tokens of all replicas: ``plait_kernels.moe.Experts``.

    A rank's output is its partial sum of the replica's: zeros but for the rows that it sent.
    """

    def __init__(self, own: Experts, held: range, group: ExpertParallel, place: int = 0) -> None:
        """``own`` are the experts of the range ``held``, counted from 0; ``place`` is the layer's in ``Peers``."""
        self._own = own
        self._held = held
        self._group = group
        self._place = place

    def summand(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dense_TD: Tensor | None) -> Summand:
        """With ``dense_TD`` added: over peers' memory, or else complete."""
        exchange = self._group.peers.exchange
        if exchange is None or not isinstance(self._own, ExpertStack | Fp8Experts | Int4Experts):
            out_TD = self(x_TD, weights_TK, experts_TK)
            return out_TD if dense_TD is None else out_TD + dense_TD
        room = self._group.room(len(x_TD))
        gathered = exchange.gather(x_TD, weights_TK, experts_TK, self._held, room, self._place)
        made = self._own.parts(gathered.x_GD, gathered.weights_GK, gathered.experts_GK, exchange.world)
        return RankSums(exchange, made, gathered, dense_TD)

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """``[T, D]``."""
        step = self._group.rows(len(x_TD))
        if max(step.counts_R) == 0:
            return torch.zeros_like(x_TD)
        sent = slice(step.own.start, step.own.stop)
        rows_GB = self._group.gather(_pack(x_TD[sent], weights_TK[sent], experts_TK[sent]), step)
        partial_GD = self._partial(*_unpack(rows_GB, x_TD, experts_TK.shape[1]))
        out_TD = torch.zeros_like(x_TD)
        out_TD[sent] = self._group.reduce_scatter(partial_GD, step)
        return out_TD

    def _partial(self, x_GD: Tensor, weights_GK: Tensor, experts_GK: Tensor) -> Tensor:
        """The sums of the own experts: each pair of a row and an own expert is a row of one expert."""
        is_own_GK = (experts_GK >= self._held.start) & (experts_GK < self._held.stop)
        row_P, choice_P = is_own_GK.nonzero(as_tuple=True)
        sums_GD = torch.zeros(x_GD.shape, dtype=torch.float32, device=x_GD.device)
        if len(row_P):
            weights_P1 = weights_GK[row_P, choice_P][:, None]
            experts_P1 = experts_GK[row_P, choice_P][:, None] - self._held.start
            sums_GD.index_add_(0, row_P, self._own(x_GD[row_P], weights_P1, experts_P1).float())
        return sums_GD.to(x_GD.dtype)


def _share(num: int, index: int, of: int) -> range:
    """The part ``index`` of ``num`` things, in ``of`` parts whose sizes differ by one at most."""
    return range(num * index // of, num * (index + 1) // of)


def _pack(x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
    """Rows with their experts, uint8 ``[N, B]``: one collective instead of three."""
    parts = (x_ND, weights_NK.to(torch.float32), experts_NK.to(torch.int32))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(rows_GB: Tensor, like_TD: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the dtype of ``like_TD``, the weights and the ids of their experts."""
    widths = (like_TD.shape[1] * like_TD.dtype.itemsize, top_k * _WEIGHT_BYTES, top_k * _ID_BYTES)
    ends = tuple(accumulate(widths))
    x, weights, ids = (
        rows_GB[:, end - width : end].contiguous().view(dtype)
        for end, width, dtype in zip(ends, widths, (like_TD.dtype, torch.float32, torch.int32), strict=True)
    )
    return x, weights, ids.to(torch.int64)
