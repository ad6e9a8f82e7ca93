"""Where a rank computes."""

from __future__ import annotations

import torch
from plait_kernels.cpu.library import set_num_threads
from plait_proto import WorkerConfig

from plait_worker.machine import num_usable_cores


def open_device(config: WorkerConfig) -> tuple[torch.device, str]:
    """The rank's device, made ready, and what it is in words.

    The cores of a machine are shared among its ranks, unless the settings give a number of threads.
    """
    num_threads = config.threads if config.threads is not None else max(1, num_usable_cores() // config.world)
    torch.set_num_threads(num_threads)
    set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
    return torch.device("cpu"), f"cpu, {num_threads} threads"
