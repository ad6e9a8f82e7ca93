"""The peer all-reduce of a rank: sum over the ranks, residual and RMS norm in one launch.

It is opened when the model's width is known. Until then, and where GPUs cannot open each other's memory, NCCL reduces.
"""

from __future__ import annotations

from plait_kernels.collective import PeerAllReduce
from plait_proto import ExitCode
from torch import Tensor

from plait_worker.errors import WorkerError


class Peers:
    """Shared by the layers of a rank, each of which is a place that a lost peer is reported at."""

    def __init__(self) -> None:
        """Nothing is opened yet."""
        self.all_reduce: PeerAllReduce | None = None
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

    def limit_waits(self, seconds: float) -> None:
        """From now on, give a peer up after so long."""
        if self.all_reduce is not None:
            self.all_reduce.limit_spins(seconds)

    def check(self) -> None:
        """Raise ``WorkerError`` of code RANK_LOST if a launch waited for a peer in vain."""
        if self.all_reduce is None or (lost := self.all_reduce.lost) is None:
            return
        raise WorkerError(
            ExitCode.RANK_LOST,
            f"rank {lost.rank} waited in vain for rank {lost.peer} in collective {lost.launch}, before "
            f"{self._places[lost.place]}: rank {lost.peer} is gone or stopped, or computes another step",
        )
