"""The all-reduce of many rows whose partial sums copy engines carry in parts, while GEMMs of other parts have the GPU.

``add_copied_rms_norm`` of ``peer_all_reduce.cu`` then adds them. Shapes: N rows, P those of a part, I the inputs of the
GEMM that makes the partial sums, D the width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.collective.peer_all_reduce import Limits, Lost, Watch, compile_for, row_shape
from plait_kernels.nvrtc import check

_SLOTS, MAX_PARTS = 2, 3
"""As in ``peer_all_reduce.cu``."""
_FLAGS = 4096
"""Values of a flag; a slot sees each again long after the last."""
_FLAG_BYTES = 4
_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""Of a GEMM's output that a multiprocessor computes at a time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a partial sum on their way to the peers."""

    number: int
    rows: slice
    partial_PD: Tensor
    """Must live until ``copied`` is waited for: the allocator knows nothing of the copies' stream."""
    copied: torch.cuda.Event


def row_parts(num_rows: int, width: int, num_multiprocessors: int) -> list[slice]:
    """Parts whose GEMMs of ``width`` outputs take no more waves of tiles together than that of all rows.

    Each takes half the waves that are left: what is computed last is short, and so is its way to the peers.
    """
    tiles_per_strip, strips = -(-width // _TILE_COLUMNS), -(-num_rows // _TILE_ROWS)
    bounds = [0]
    while strips:
        waves = -(-strips * tiles_per_strip // num_multiprocessors)
        taken = -(-waves // 2) * num_multiprocessors // tiles_per_strip
        if waves == 1 or len(bounds) == MAX_PARTS or taken == 0:
            taken = strips
        strips -= taken
        bounds.append(bounds[-1] + taken * _TILE_ROWS)
    return [slice(begin, min(end, num_rows)) for begin, end in itertools.pairwise(bounds)]


class CopiedAllReduce:
    """One rank's side. All ranks make the same calls in the same order, never while a graph is captured."""

    def __init__(self, rank: int, memories: Sequence[int], limits: Limits, device: torch.device) -> None:
        """``memories`` are the addresses on this device of every rank's memory, filled with zeros."""
        from cuda.bindings import driver

        self._rank = rank
        self._memories = memories
        self._limits = limits
        self._shape = row_shape(limits)
        self._watch = Watch(rank, memories, limits, device)
        self._kernel = compile_for(limits, device)["add_copied_rms_norm"]
        self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._flags = torch.arange(1, _FLAGS + 1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device)
        self._driver_stream = driver.CUstream(self._stream.cuda_stream)
        self._computed, self._copied = ([torch.cuda.Event() for _ in range(_SLOTS * MAX_PARTS)] for _ in range(2))
        self._num_reductions = 0
        torch.cuda.synchronize(device)

    @staticmethod
    def memory_bytes(limits: Limits, world: int) -> int:
        """What each rank's memory must hold."""
        slot_bytes = limits.max_rows * limits.width * limits.dtype.itemsize + MAX_PARTS * _FLAG_BYTES
        return _SLOTS * (world - 1) * slot_bytes

    def add_rms_norm(
        self,
        gemm: Callable[[Tensor], Tensor],
        x_NI: Tensor,
        residual_ND: Tensor,
        weight_D: Tensor,
        eps: float,
        place: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """See ``plait_kernels.collective.reference.add_partials_rms_norm``; a rank's partial sum is ``gemm(x)``.

        ``gemm`` takes any rows. ``place`` is reported if a peer is lost.
        """
        normed_ND, sum_ND = torch.empty_like(residual_ND), torch.empty_like(residual_ND)
        parts = row_parts(len(residual_ND), self._limits.width, self._num_multiprocessors)
        begun = [self._begin(number, rows, gemm(x_NI[rows])) for number, rows in enumerate(parts)]
        # A flag that no reduction writes while the values go round would tell of a part that has not come.
        for number in range(len(parts), MAX_PARTS):
            self._flag_peers(number)
        for part in begun:
            given = residual_ND[part.rows], weight_D, normed_ND[part.rows], sum_ND[part.rows]
            self._finish(part, *given, eps, place)
        self._num_reductions += 1
        return normed_ND, sum_ND

    def _begin(self, number: int, rows: slice, partial_PD: Tensor) -> _Part:
        """Carry it to the peers as soon as the current stream has computed it."""
        assert partial_PD.is_contiguous()
        event = self._num_reductions % _SLOTS * MAX_PARTS + number
        self._computed[event].record()
        self._stream.wait_event(self._computed[event])
        for peer in self._peers:
            self._copy(partial_PD, peer, rows.start)
        self._flag_peers(number)
        self._copied[event].record(self._stream)
        return _Part(number, rows, partial_PD, self._copied[event])

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(len(self._memories)) if rank != self._rank]

    def _copy(self, partial_PD: Tensor, peer: int, first_row: int) -> None:
        from cuda.bindings import driver

        row_bytes = self._limits.width * self._limits.dtype.itemsize
        region = self._num_reductions % _SLOTS * len(self._peers) + self._source(peer)
        place = self._memories[peer] + (region * self._limits.max_rows + first_row) * row_bytes
        check(driver.cuMemcpyDtoDAsync(place, partial_PD.data_ptr(), partial_PD.nbytes, self._driver_stream))

    def _flag_peers(self, number: int) -> None:
        """Tell that all copies before have come."""
        from cuda.bindings import driver

        others, slot = len(self._peers), self._num_reductions % _SLOTS
        before = _SLOTS * others * self._limits.max_rows * self._limits.width * self._limits.dtype.itemsize
        value = self._flags.data_ptr() + self._num_reductions % _FLAGS * _FLAG_BYTES
        for peer in self._peers:
            index = (slot * MAX_PARTS + number) * others + self._source(peer)
            flag = self._memories[peer] + before + index * _FLAG_BYTES
            check(driver.cuMemcpyDtoDAsync(flag, value, _FLAG_BYTES, self._driver_stream))

    def _source(self, peer: int) -> int:
        """This rank's number among those that write into the peer's memory."""
        return self._rank if self._rank < peer else self._rank - 1

    def _finish(
        self,
        part: _Part,
        residual_PD: Tensor,
        weight_D: Tensor,
        normed_PD: Tensor,
        sum_PD: Tensor,
        eps: float,
        place: int,
    ) -> None:
        num_rows, shape, reduction = len(residual_PD), self._shape, self._num_reductions
        torch.cuda.current_stream().wait_event(part.copied)
        blocks = (min(num_rows, self._limits.max_blocks), shape.threads, 0)
        given = (part.partial_PD, residual_PD, weight_D, normed_PD, sum_PD, num_rows, shape.vectors)
        sent = (reduction, part.number, part.rows.start, reduction % _FLAGS + 1)
        self._kernel(blocks, *given, float(eps), place, self._watch.state, *sent)

    def supports(self, x_ND: Tensor) -> bool:
        """Whether partial sums of such rows fit."""
        num_rows, width = x_ND.shape
        return (
            0 < num_rows <= self._limits.max_rows and width == self._limits.width and x_ND.dtype == self._limits.dtype
        )

    def limit_spins(self, seconds: float) -> None:
        """Give a peer up after so long, in launches that the host makes from now on."""
        self._watch.limit_spins(seconds)

    @property
    def lost(self) -> Lost | None:
        """The first wait that was given up."""
        return self._watch.lost
