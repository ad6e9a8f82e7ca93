"""The all-reduce of many rows whose partial sums copy engines carry, while GEMMs of other rows have the GPU.

``add_copied_rms_norm`` of ``peer_all_reduce.cu`` then adds them. Shapes: N rows, D the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.collective.peer_all_reduce import Limits, Lost, Watch, compile_for, row_shape
from plait_kernels.nvrtc import check

_SLOTS = 4
"""``COPY_SLOTS`` of ``peer_all_reduce.cu``."""
_FLAGS = 4096
"""Values of a flag; a slot sees each again long after the last."""
_FLAG_BYTES = 4


@dataclass(frozen=True, slots=True)
class Copying:
    """A partial sum on its way to the peers."""

    launch: int
    """Launches before it."""
    partial_ND: Tensor
    """Must live until ``copied`` is waited for: the allocator knows nothing of the copies' stream."""
    copied: torch.cuda.Event


class CopiedAllReduce:
    """One rank's side. All ranks make the same calls in the same order, never while a graph is captured.

    Between ``begin`` and its ``finish`` one other may begin, and no more.
    """

    def __init__(self, rank: int, memories: Sequence[int], limits: Limits, device: torch.device) -> None:
        """``memories`` are the addresses on this device of every rank's memory, filled with zeros."""
        from cuda.bindings import driver

        self._rank = rank
        self._memories = memories
        self._limits = limits
        self._shape = row_shape(limits)
        self._watch = Watch(rank, memories, limits, device)
        self._kernel = compile_for(limits, device)["add_copied_rms_norm"]
        self._flags = torch.arange(1, _FLAGS + 1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device)
        self._driver_stream = driver.CUstream(self._stream.cuda_stream)
        self._computed, self._copied = ([torch.cuda.Event() for _ in range(_SLOTS)] for _ in range(2))
        self._num_launches = 0
        torch.cuda.synchronize(device)

    @staticmethod
    def memory_bytes(limits: Limits, world: int) -> int:
        """What each rank's memory must hold."""
        return _SLOTS * (world - 1) * (limits.max_rows * limits.width * limits.dtype.itemsize + _FLAG_BYTES)

    def begin(self, partial_ND: Tensor) -> Copying:
        """Carry it to the peers as soon as the current stream has computed it."""
        launch = self._num_launches
        self._num_launches += 1
        computed, copied = self._computed[launch % _SLOTS], self._copied[launch % _SLOTS]
        computed.record()
        self._stream.wait_event(computed)
        for peer in range(len(self._memories)):
            if peer != self._rank:
                self._copy(partial_ND, peer, launch)
        copied.record(self._stream)
        return Copying(launch, partial_ND, copied)

    def _copy(self, partial_ND: Tensor, peer: int, launch: int) -> None:
        from cuda.bindings import driver

        others = len(self._memories) - 1
        region = launch % _SLOTS * others + (self._rank if self._rank < peer else self._rank - 1)
        region_bytes = self._limits.max_rows * self._limits.width * self._limits.dtype.itemsize
        base, stream = self._memories[peer], self._driver_stream
        place, flag = base + region * region_bytes, base + _SLOTS * others * region_bytes + region * _FLAG_BYTES
        check(driver.cuMemcpyDtoDAsync(place, partial_ND.data_ptr(), partial_ND.nbytes, stream))
        value = self._flags.data_ptr() + launch % _FLAGS * _FLAG_BYTES
        check(driver.cuMemcpyDtoDAsync(flag, value, _FLAG_BYTES, stream))

    def finish(
        self, copying: Copying, residual_ND: Tensor, weight_D: Tensor, eps: float, place: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See ``plait_kernels.collective.reference.add_partials_rms_norm``; ``place`` is reported if a peer is lost."""
        normed_ND, sum_ND = torch.empty_like(residual_ND), torch.empty_like(residual_ND)
        num_rows, shape, launch = residual_ND.shape[0], self._shape, copying.launch
        torch.cuda.current_stream().wait_event(copying.copied)
        blocks = (min(num_rows, self._limits.max_blocks), shape.threads, 0)
        given = (copying.partial_ND, residual_ND, weight_D, normed_ND, sum_ND, num_rows, shape.vectors)
        self._kernel(blocks, *given, float(eps), place, self._watch.state, launch, launch % _FLAGS + 1)
        return normed_ND, sum_ND

    def supports(self, partial_ND: Tensor) -> bool:
        """Whether a call fits."""
        num_rows, width = partial_ND.shape
        fits = 0 < num_rows <= self._limits.max_rows and width == self._limits.width
        return fits and partial_ND.is_contiguous() and partial_ND.dtype == self._limits.dtype

    def limit_spins(self, seconds: float) -> None:
        """Give a peer up after so long, in launches that the host makes from now on."""
        self._watch.limit_spins(seconds)

    @property
    def lost(self) -> Lost | None:
        """The first wait that was given up."""
        return self._watch.lost
