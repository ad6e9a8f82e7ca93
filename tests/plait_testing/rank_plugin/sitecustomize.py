"""Python reads this at its start if its folder is on the path. It changes the ranks of a server, as variables say.

``PLAIT_TEST_SHARED_GPU=1``: all ranks compute on the first GPU. Their peer collectives work as between GPUs, though by
turns: the driver gives each process the GPU for a while. NCCL refuses two ranks on a GPU, so the other collectives go
through the host, by gloo. ``PLAIT_TEST_FAULT=STAGE:FAULT:RANK``: that rank fails while it is loading, capturing or
serving, by an exception, by asking for too much GPU memory, or by standing still (``hang``).
``PLAIT_TEST_UNREACHABLE=RANK``: that rank cannot open the memory of the other GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS_BEFORE_FAULT = 50
HANG_SECONDS = 3600.0


def through_the_host(collective: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method of ``Parallel`` that gives a tensor of its own."""
    return lambda parallel, tensor: collective(parallel, tensor.cpu()).to(tensor.device)


def in_place(collective: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method of ``Parallel`` that overwrites the tensor."""
    copy = through_the_host(collective)
    return lambda parallel, tensor: tensor.copy_(copy(parallel, tensor)) if tensor.is_cuda else copy(parallel, tensor)


def share_gpu() -> None:
    from plait_worker import device
    from plait_worker.parallel import Parallel

    open_gpu = device._open_gpu
    device._open_gpu = lambda config, rank: open_gpu(config, 0)
    device.check_num_gpus = lambda world, dp, num_gpus: None
    for name in ("all_gather", "trade_columns_for_rows"):
        setattr(Parallel, name, through_the_host(getattr(Parallel, name)))
    for name in ("all_reduce", "all_max", "broadcast"):
        setattr(Parallel, name, in_place(getattr(Parallel, name)))


def reject_peers() -> None:
    from plait_kernels.collective import PeerMemory
    from plait_kernels.nvrtc import CudaError

    def refuse(*_arguments: Any) -> list[int]:
        raise CudaError("the CUDA driver answered CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    PeerMemory.open_all = refuse  # type: ignore[assignment, method-assign]


def plant(stage: str, fault: str) -> None:
    from plait_worker import graphs, start
    from plait_worker.rank import Rank

    def fail(*_arguments: Any) -> None:
        import torch

        if fault == "exception":
            raise RuntimeError("a planted exception")
        if fault == "hang":
            time.sleep(HANG_SECONDS)
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

    def failing_after(call: Callable[..., Any], num_calls: int) -> Callable[..., Any]:
        made: list[None] = []

        def count(*arguments: Any) -> Any:
            made.append(None)
            return fail() if len(made) > num_calls else call(*arguments)

        return count

    if stage == "loading":
        start._load_model = failing_after(start._load_model, 0)
    elif stage == "capturing":
        graphs.StepGraph = failing_after(graphs.StepGraph, 3)  # type: ignore[assignment, misc]
    else:
        Rank.launch = failing_after(Rank.launch, STEPS_BEFORE_FAULT)  # type: ignore[method-assign]


if "plait_worker" in sys.orig_argv:
    own_rank = sys.orig_argv[sys.orig_argv.index("--rank") + 1]
    if os.environ.get("PLAIT_TEST_SHARED_GPU"):
        share_gpu()
    if planted := os.environ.get("PLAIT_TEST_FAULT"):
        stage, fault, rank = planted.split(":")
        if own_rank == rank:
            plant(stage, fault)
    if os.environ.get("PLAIT_TEST_UNREACHABLE") == own_rank:
        reject_peers()
