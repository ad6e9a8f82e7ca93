"""What a rank does over its peers' memory: the all-reduces of a replica, the exchange of a group that shares experts.

Each includes the sum with the residual and the RMS norm after it. They are opened when the model's width is known.
Until then, and where GPUs cannot open each other's memory, NCCL is used. Shapes: N rows, D the width, I inputs of a
GEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from plait_kernels.collective import CopiedAllReduce, ExpertExchange, PeerAllReduce
from plait_proto import ExitCode
from torch import Tensor

from plait_worker.errors import WorkerError

LEAST_HIDDEN = 4096
"""Rows of a step from which copies of some are hidden behind the GEMMs of others; never in a captured step.

It takes more launches, which the host must make faster than the device computes.
"""


class Peers:
    """Shared by the layers of a rank, each of which is a place that a lost peer is reported at."""

    def __init__(self) -> None:
        """Nothing is opened yet."""
        self.all_reduce: PeerAllReduce | None = None
        self.exchange: ExpertExchange | None = None
        self.copied: CopiedAllReduce | None = None
        self._places: list[str] = []

    def add_place(self, name: str) -> int:
        """The number of a layer."""
        self._places.append(name)
        return len(self._places) - 1

    def add_rms_norm(
        self, partial_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, place: int
    ) -> tuple[Tensor, Tensor] | None:
        """The norm of the ranks' sum and the residual, and that sum; None if NCCL has to reduce."""
        if self.all_reduce is None or not self.all_reduce.supports(partial_ND):
            return None
        return self.all_reduce.add_rms_norm(partial_ND, residual_ND, weight_D, eps, place)

    def largest_logit(
        self, logits_SU: Tensor, own_ids_S: Tensor, first: int, num_own: int, place: int
    ) -> Tensor | None:
        """See ``PeerAllReduce.largest_logit``; None if NCCL has to find it."""
        if self.all_reduce is None or not self.all_reduce.supports_logits(logits_SU):
            return None
        return self.all_reduce.largest_logit(logits_SU, own_ids_S, first, num_own, place)

    def hides(self, x_ND: Tensor) -> bool:
        """Whether ``add_parts_rms_norm`` takes a step with these rows."""
        if self.copied is None or x_ND.shape[0] < LEAST_HIDDEN:
            return False
        if x_ND.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return self.copied.supports(x_ND)

    def add_parts_rms_norm(
        self,
        gemm: Callable[[Tensor], Tensor],
        x_NI: Tensor,
        residual_ND: Tensor,
        weight_D: Tensor,
        eps: float,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        """The norm of the ranks' sum of ``gemm(x)`` and the residual, and that sum, in a step of ``hides``."""
        assert self.copied is not None
        return self.copied.add_rms_norm(gemm, x_NI, residual_ND, weight_D, eps, place)

    def limit_waits(self, seconds: float) -> None:
        """From now on, give a peer up after so long."""
        for opened in (self.all_reduce, self.copied, self.exchange):
            if opened is not None:
                opened.limit_spins(seconds)

    def check(self) -> None:
        """Raise ``WorkerError`` of code RANK_LOST if a launch waited for a peer in vain."""
        for reduce in (self.all_reduce, self.copied):
            if reduce is not None and (lost := reduce.lost) is not None:
                where = f"collective {lost.launch}, before {self._places[lost.place]}"
                raise self._rank_lost(lost.rank, lost.peer, where)
        if self.exchange is not None and (missing := self.exchange.lost) is not None:
            raise self._rank_lost(missing.rank, missing.peer, f"the exchange at {self._places[missing.place]}")

    @staticmethod
    def _rank_lost(rank: int, peer: int, where: str) -> WorkerError:
        return WorkerError(
            ExitCode.RANK_LOST,
            f"rank {rank} waited in vain for rank {peer} in {where}: rank {peer} is gone or stopped, or computes "
            "another step",
        )
