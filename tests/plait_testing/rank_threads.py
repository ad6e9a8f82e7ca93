"""Several ranks as threads of one process, for what they compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from plait_worker.parallel import Parallel

T = TypeVar("T")
MEET_SECONDS = 60.0


def gloo(rank: int, world: int, store: dist.Store) -> dist.ProcessGroup:
    """A group of this test's own, so that the ranks can be threads of one process."""
    group = dist.ProcessGroup(store, rank, world)
    backend = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=MEET_SECONDS))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def on_every_rank(world: int, folder: Path, run: Callable[[Parallel], T]) -> list[T]:
    """What ``run`` returns on each rank."""
    # A rank that ends closes its connections, which others may still be opening.
    all_met = threading.Barrier(world, timeout=MEET_SECONDS)

    def one(rank: int) -> T:
        group = gloo(rank, world, dist.FileStore(str(folder / "store"), world))
        all_met.wait()
        return run(Parallel(rank, world, group))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))
