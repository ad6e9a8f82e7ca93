"""The exchange of replicas that share their experts, over memory that peers write into (``expert_exchange.cu``).

Shapes: T rows of a step, R ranks, G = R S gathered rows with room for S of each rank, D the width, K experts a row.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plait_kernels.collective.peer_all_reduce import MAX_RANKS, MAX_THREADS, VECTOR_BYTES, unsupported_reason
from plait_kernels.moe import RowParts
from plait_kernels.nvrtc import Kernel, compile_kernels

_SOURCE = Path(__file__).with_name("expert_exchange.cu")
_STATE = struct.Struct(f"<2I4Q{MAX_RANKS}QI")
"""``State`` of ``expert_exchange.cu``."""
_SPIN_OFFSET = struct.calcsize("<2I2Q")
_REGISTERS_FOR = 1024
"""Threads of a multiprocessor that have registers at once, whatever a kernel needs."""


@dataclass(frozen=True, slots=True)
class LostSender:
    """A rank waited for a peer in vain."""

    rank: int
    peer: int
    """The rank that it waited for."""
    place: int
    """As the call gave it."""


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """What all ranks of a group must have in common."""

    max_rows: int
    """Rows that a rank sends at most."""
    width: int
    """D."""
    top_k: int
    """K."""
    dtype: torch.dtype
    num_multiprocessors: int
    """All blocks of a launch must be resident at once, since each waits for its peers'."""
    spin_seconds: float = 20.0
    """After which a peer is given up."""

    @property
    def row_vectors(self) -> int:
        """16-byte vectors of D elements."""
        return self.width * self.dtype.itemsize // VECTOR_BYTES

    def memory_bytes(self, world: int) -> int:
        """What each rank's memory must hold: rows with ids and weights, and sums."""
        meta_vectors = -(-2 * self.top_k // 4)
        return (world - 1) * self.max_rows * (2 * self.row_vectors + meta_vectors) * VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class SentRows:
    """Who sends which rows in a step."""

    counts_R: Sequence[int]
    """Rows that each rank sends."""
    num_first: int
    """Own rows that are sent are the first ones, so many,"""
    second_begin: int
    """and those from here on."""


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """The rows of all ranks; those that a rank sent come first among its S."""

    x_GD: Tensor
    weights_GK: Tensor
    """float32."""
    experts_GK: Tensor
    """int64, counted from the first that this rank holds; -1 for others' and for rows that nobody sent."""


def unsupported_exchange(world: int, width: int, top_k: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not take such rows; None if they do."""
    if top_k > 16:
        return f"takes up to 16 experts a token, not {top_k}"
    return unsupported_reason(world, width, dtype)


class ExpertExchange:
    """One rank's side. All ranks make the same calls in the same order, on one stream: gather, then return."""

    def __init__(self, rank: int, memories: Sequence[int], limits: ExchangeLimits, device: torch.device) -> None:
        """``memories`` are the addresses on this device of every rank's memory, filled with ``EMPTY``."""
        self.limits = limits
        self.world = len(memories)
        vectors = 1 if limits.row_vectors <= MAX_THREADS else 2
        self._sum_threads = -(-limits.row_vectors // vectors // 32) * 32
        self._row_threads = min(MAX_THREADS, -(-(limits.row_vectors + limits.top_k) // 32) * 32)
        self._kernels = _compile(limits.dtype, vectors, limits.top_k, device)
        self._report = torch.zeros(4, dtype=torch.int32, pin_memory=True)
        state = _STATE.pack(
            *(rank, len(memories)),
            *(limits.max_rows, limits.row_vectors, int(limits.spin_seconds * 1e9), self._report.data_ptr()),
            *(*memories, *[0] * (MAX_RANKS - len(memories))),
            0,
        )
        self._state = torch.frombuffer(bytearray(state), dtype=torch.uint8).to(device)
        self._step = torch.zeros(MAX_RANKS + 2, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)

    def begin_step(self, sent: SentRows) -> None:
        """For the launches that follow, and for replays of captured ones."""
        counts = [*sent.counts_R, *[0] * (MAX_RANKS - self.world)]
        written = np.array([*counts, sent.num_first, sent.second_begin], dtype=np.int32)
        self._step.copy_(torch.from_numpy(written).pin_memory(), non_blocking=True)

    def gather(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, held: range, room: int, place: int = 0
    ) -> GatheredRows:
        """The rows of all ranks with the experts of ``held``; ``room`` is S, as many as any rank sends."""
        num_rows, top_k = self.world * room, self.limits.top_k
        x_GD = x_TD.new_empty(num_rows, self.limits.width)
        weights_GK = weights_TK.new_empty(num_rows, top_k)
        experts_GK = experts_TK.new_empty(num_rows, top_k)
        given = (x_TD, weights_TK, experts_TK, x_GD, weights_GK, experts_GK)
        self._kernels["gather_rows"](
            (self._num_blocks(room, self._row_threads), self._row_threads, 0),
            *(*given, room, held.start, len(held), self._step, place, self._state),
            pdl=True,
        )
        return GatheredRows(x_GD, weights_GK, experts_GK)

    def add_rms_norm(
        self,
        made: RowParts,
        gathered: GatheredRows,
        dense_TD: Tensor | None,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        place: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The norm of own rows' sums over the ranks with ``dense_TD`` and the residual, and that sum."""
        normed_TD, sum_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
        num_rows, room = len(residual_TD), len(gathered.x_GD) // self.world
        no_index = 0 if made.index_N is None else made.index_N
        weights = 0 if made.is_summed else gathered.weights_GK
        self._kernels["return_sums_add_rms_norm"](
            (self._num_blocks(max(num_rows, room), self._sum_threads), self._sum_threads, 0),
            *(made.parts, no_index, weights, gathered.experts_GK, room),
            *(0 if dense_TD is None else dense_TD, residual_TD, weight_D),
            *(normed_TD, sum_TD, num_rows, float(eps), self._step, place, self._state),
            pdl=True,
        )
        return normed_TD, sum_TD

    def _num_blocks(self, num_rows: int, num_threads: int) -> int:
        return max(1, min(num_rows, self.limits.num_multiprocessors * (_REGISTERS_FOR // num_threads)))

    def limit_spins(self, seconds: float) -> None:
        """Give a peer up after so long, in launches that the host makes or replays from now on."""
        nanoseconds = torch.tensor([int(seconds * 1e9)], dtype=torch.int64).view(torch.uint8)
        self._state[_SPIN_OFFSET : _SPIN_OFFSET + 8].copy_(nanoseconds)

    @property
    def lost(self) -> LostSender | None:
        """The first wait that was given up; results after it are wrong. Costs nothing: it is in the host's memory."""
        is_lost, *rest = self._report.tolist()
        return LostSender(*rest) if is_lost else None


@functools.cache
def _compile(dtype: torch.dtype, vectors: int, top_k: int, device: torch.device) -> dict[str, Kernel]:
    is_half = ("IS_HALF",) if dtype == torch.float16 else ()
    defines = (f"VECTORS={vectors}", f"TOP_K={top_k}", "PDL", *is_half)
    return compile_kernels(_SOURCE, ("gather_rows", "return_sums_add_rms_norm"), defines, device)
