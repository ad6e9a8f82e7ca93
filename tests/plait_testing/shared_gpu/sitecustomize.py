"""Python reads this at its start if its folder is on the path. All ranks of a server compute on the first GPU.

Their peer collectives work as between GPUs, though by turns: the driver gives each process the GPU for a while. NCCL
refuses two ranks on a GPU, so the other collectives go through the host, by gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def through_the_host(collective: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method of ``Parallel`` that gives a tensor of its own."""

    def call(parallel: Any, tensor: Any) -> Any:
        made = collective(parallel, tensor.cpu())
        return made.to(tensor.device)

    return call


def in_place(collective: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method of ``Parallel`` that overwrites the tensor."""
    copy = through_the_host(collective)
    return lambda parallel, tensor: tensor.copy_(copy(parallel, tensor)) if tensor.is_cuda else copy(parallel, tensor)


if "plait_worker" in sys.orig_argv:
    from plait_worker import device
    from plait_worker.parallel import Parallel

    open_gpu = device._open_gpu
    device._open_gpu = lambda config, rank: open_gpu(config, 0)
    device.check_num_gpus = lambda world, dp, num_gpus: None
    for name in ("all_gather", "trade_columns_for_rows"):
        setattr(Parallel, name, through_the_host(getattr(Parallel, name)))
    for name in ("all_reduce", "all_max", "broadcast"):
        setattr(Parallel, name, in_place(getattr(Parallel, name)))
