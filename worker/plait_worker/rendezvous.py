"""How the ranks of a replica meet: gloo for tensors on the CPU and, with GPUs, NCCL for theirs.

NVLink multicast is never used: on some shared hosts it takes every GPU out of service. No setting allows it yet.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from plait_proto import ExitCode, WorkerConfig

from plait_worker.errors import WorkerError, first_line
from plait_worker.parallel import Parallel

WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Environment variables of the libraries that would use it by default."""


def forbid_multicast() -> None:
    """Set the variables for this process and its children, whatever they were; call it before a GPU is used."""
    for name, value in WITHOUT_MULTICAST.items():
        os.putenv(name, value)


def check_rank(config: WorkerConfig, rank: int) -> None:
    """Raise ``WorkerError`` of code SETTINGS if the rank is none of this world."""
    if not 0 <= rank < config.world:
        raise WorkerError(
            ExitCode.SETTINGS, f"--rank {rank} of a world of {config.world}: give 0 to {config.world - 1}"
        )


def init_parallel(config: WorkerConfig, rank: int, device: torch.device) -> Parallel:
    """Join the other ranks: over TCP on loopback, with addresses in a FileStore in the run directory.

    Raises ``WorkerError`` of code RANK_LOST if another is missing.
    """
    if config.world == 1:
        return Parallel()
    store = dist.FileStore(str(Path(config.run_dir) / "ranks"), config.world)
    backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backends, store=store, rank=rank, world_size=config.world)
    except RuntimeError as error:
        raise WorkerError(ExitCode.RANK_LOST, f"the {config.world} ranks did not meet: {error}") from error
    parallel = Parallel(rank, config.world, dist.group.WORLD)
    parallel.wait_for_all()
    return parallel


def connect_gpus(parallel: Parallel, device: torch.device) -> None:
    """Make NCCL connect the GPUs, and load its kernels. Raises ``WorkerError`` of code HARDWARE if it cannot.

    The ranks have agreed by then (``agreement``): NCCL waits for a rank that is gone.
    """
    if parallel.world == 1 or device.type == "cpu":
        return
    try:
        dist.all_reduce(torch.ones(1, device=device), group=parallel.group)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"NCCL cannot connect the {parallel.world} GPUs: {first_line(error)}; NCCL_DEBUG=INFO says more",
        ) from error
