"""The device that a rank computes on."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

import torch
from plait_kernels.cpu.library import set_num_threads
from plait_proto import ExitCode, WorkerConfig

from plait_worker.errors import WorkerError
from plait_worker.machine import num_usable_cores
from plait_worker.numa import bind_to_gpu_node

_log = logging.getLogger(__name__)

_KERNEL_PACKAGES = ("triton", "flashinfer-python", "sgl-flash-mla")
"""Whose kernels a GPU may run."""


def open_device(config: WorkerConfig, rank: int) -> tuple[torch.device, str]:
    """The device of an engine's rank, ready for use, and its description; the N-th rank of a host has its N-th GPU.

    The ranks of a machine share its cores evenly, unless the settings give a number of threads.
    Raises ``WorkerError`` of code HARDWARE if the settings ask for more GPUs than are there, or for more threads than
    the system starts.
    """
    num_threads = (
        config.threads if config.threads is not None else max(1, num_usable_cores() // config.parallel.num_local_ranks)
    )
    torch.set_num_threads(num_threads)
    _start_kernel_threads(num_threads)
    torch.set_num_interop_threads(1)
    if config.device.device == "cpu" or (config.device.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), f"cpu, {num_threads} threads"
    return _open_gpu(config, rank)


def _start_kernel_threads(num_threads: int) -> None:
    try:
        set_num_threads(num_threads)
    except RuntimeError as error:
        raise WorkerError(ExitCode.HARDWARE, f"{num_threads} threads on a CPU: {error}; set --threads lower") from error


def _open_gpu(config: WorkerConfig, rank: int) -> tuple[torch.device, str]:
    if not torch.cuda.is_available():
        raise WorkerError(
            ExitCode.HARDWARE,
            f"--device cuda: no NVIDIA GPU is there for torch {torch.__version__}; check the driver with nvidia-smi, "
            "or serve with --device cpu",
        )
    parallel, num_gpus = config.parallel, torch.cuda.device_count()
    if parallel.num_local_ranks == parallel.num_ranks:
        check_num_gpus(parallel.world, parallel.dp, num_gpus)
    elif parallel.num_local_ranks > num_gpus:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"this host has {parallel.num_local_ranks} of {parallel.num_ranks} ranks, one a GPU, and {num_gpus} GPUs "
            "are visible; make more visible (CUDA_VISIBLE_DEVICES), or take more hosts",
        )
    device = torch.device("cuda", rank % parallel.num_local_ranks)
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    if (node := bind_to_gpu_node(device)) is not None:
        _log.info("bound to the NUMA node of the GPU: %s", node)
    return device, name


def check_num_gpus(world: int, dp: int, num_gpus: int) -> None:
    """Raise ``WorkerError`` of code HARDWARE unless there is a GPU for every rank of ``dp`` replicas."""
    if world * dp > num_gpus:
        given = f"--tp {world}" if dp == 1 else f"--dp {dp} with --tp {world}"
        limit = f"--tp to {num_gpus} at most" if dp == 1 else f"them so that --dp times --tp is {num_gpus} at most"
        raise WorkerError(
            ExitCode.HARDWARE,
            f"{given} needs {world * dp} GPUs, one a rank, and {num_gpus} {'is' if num_gpus == 1 else 'are'} visible; "
            f"set {limit}, make more visible (CUDA_VISIBLE_DEVICES), or add --device cpu",
        )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """NVIDIA's compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_facts(device: torch.device) -> dict[str, str]:
    """What the ranks of a replica must have in common, by the name for a message."""
    facts = {"device": device.type, "torch": str(torch.__version__)}
    if device.type == "cpu":
        return facts
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "GPU": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        **{package: _version(package) for package in _KERNEL_PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def num_driver_allocations(device: torch.device) -> int:
    """How often torch has asked the GPU driver for memory so far; 0 for a CPU."""
    return int(torch.cuda.memory_stats(device)["num_device_alloc"]) if device.type == "cuda" else 0


def free_device_bytes(device: torch.device) -> int:
    """Free GPU memory, after torch's unused cache is released."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
