"""How the ranks of a replica find each other."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from plait_proto import ExitCode, WorkerConfig

from plait_worker.failure import Failure
from plait_worker.parallel import Parallel


def meet(config: WorkerConfig, rank: int) -> Parallel:
    """Join the other ranks, whose addresses a file in the run directory tells; between them is TCP, on loopback (gloo).

    Raises ``Failure`` of code SETTINGS where the rank is none of this world, of RANK_LOST where another does not come.
    """
    if not 0 <= rank < config.world:
        raise Failure(ExitCode.SETTINGS, f"--rank {rank} of a world of {config.world}: give 0 to {config.world - 1}")
    if config.world == 1:
        return Parallel()
    store = dist.FileStore(str(Path(config.run_dir) / "ranks"), config.world)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=config.world)
    except RuntimeError as error:
        raise Failure(ExitCode.RANK_LOST, f"the {config.world} ranks did not meet: {error}") from error
    return Parallel(rank, config.world, dist.group.WORLD)
