"""How the ranks of a replica meet: gloo for tensors on the CPU and, with GPUs, NCCL for theirs.

NVLink multicast is never used: on some shared hosts it takes every GPU out of service. No setting allows it yet.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from plait_kernels.collective import (
    EMPTY,
    CopiedAllReduce,
    ExchangeLimits,
    ExpertExchange,
    Limits,
    PeerAllReduce,
    PeerMemory,
    unsupported_exchange,
    unsupported_reason,
)
from plait_kernels.nvrtc import CudaError
from plait_proto import ExitCode, ParallelConfig, WorkerConfig

from plait_worker.engine_store import EngineStore
from plait_worker.errors import WorkerError, first_line
from plait_worker.expert_parallel import ExpertParallel, exchange_for
from plait_worker.link import Link
from plait_worker.model_config import ModelConfig
from plait_worker.parallel import Parallel
from plait_worker.peers import LEAST_HIDDEN

_log = logging.getLogger(__name__)

T = TypeVar("T")

_REASON_BYTES = 512
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs between hosts; 37 bytes."""

_START_SECONDS = 30.0
"""After which an all-reduce gives a peer up. Ranks that start compile for a few seconds beside each other."""
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
    """Raise ``WorkerError`` of code SETTINGS if the rank is none of this engine's."""
    world = config.parallel.num_ranks
    if not 0 <= rank < world:
        raise WorkerError(ExitCode.SETTINGS, f"--rank {rank} of a world of {world}: give 0 to {world - 1}")


def init_parallel(config: WorkerConfig, rank: int, device: torch.device, link: Link | None) -> Parallel:
    """Join the other ranks of the replica over TCP. Addresses go through a FileStore, or through the engine.

    Ranks of replicas that share their experts join all others of the group. Raises ``WorkerError`` of code RANK_LOST if
    another is missing, and of code SETTINGS if the ranks meet by way of an engine and there is no link.
    """
    world = config.parallel.world
    replica, place = divmod(rank, world)
    store = _engine_store(config.parallel, link)
    if config.parallel.dp_attention:
        return replace(_init_group(config.parallel, Path(config.run_dir), rank, device, store), store=store)
    if world == 1:
        return Parallel()
    file = Path(config.run_dir) / f"ranks-{replica}"
    _meet(store or dist.FileStore(str(file), world), place, world, device)
    parallel = Parallel(place, world, dist.group.WORLD, store=store)
    parallel.wait_for_all()
    return parallel


def _engine_store(config: ParallelConfig, link: Link | None) -> dist.Store | None:
    """None if one engine on this host has all ranks."""
    if not config.meets_by_engine:
        return None
    if link is None:
        raise WorkerError(
            ExitCode.SETTINGS, "parallel.meets_by_engine: the ranks meet by way of an engine, and none is there"
        )
    return EngineStore(link, of_group=config.dp_attention)


def _init_group(
    config: ParallelConfig, run_dir: Path, rank: int, device: torch.device, store: dist.Store | None
) -> Parallel:
    """A rank of replicas that share their experts."""
    group, tp = config.group, config.world
    num_replicas = config.dp if group is None else group.num_replicas
    rank, world = rank + (0 if group is None else group.first_replica * tp), num_replicas * tp
    replica, place = divmod(rank, tp)
    if world > 1:
        _meet(store or dist.FileStore(str(run_dir / "ranks"), world), rank, world, device)
    everyone = Parallel(rank, world, dist.group.WORLD if world > 1 else None, setting="of --dp-attention")
    experts = ExpertParallel(everyone, replica, num_replicas, exchange_for(device.type, everyone))
    everyone.wait_for_all()
    if tp == 1:
        return Parallel(experts=experts)
    # Every rank takes part in making every replica's group.
    within = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)]
    return Parallel(place, tp, within[replica], experts=experts)


def _meet(store: dist.Store, rank: int, world: int, device: torch.device) -> None:
    """Make the process group of ``dist.group.WORLD``."""
    backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backends, store=store, rank=rank, world_size=world)
    except RuntimeError as error:
        raise WorkerError(ExitCode.RANK_LOST, f"the {world} ranks did not meet: {error}") from error


def connect_gpus(parallel: Parallel, device: torch.device) -> None:
    """Make NCCL connect the GPUs, and load its kernels. Raises ``WorkerError`` of code HARDWARE if it cannot.

    The ranks have agreed by then (``agreement``): NCCL waits for a rank that is gone.
    """
    if parallel.world == 1 or device.type == "cpu":
        return
    try:
        ones = torch.ones(1, dtype=torch.int64, device=device)
        for connect in (parallel.all_reduce, parallel.all_max, parallel.all_gather, parallel.broadcast):
            connect(ones)
        parallel.trade_columns_for_rows(ones[None])
        torch.cuda.synchronize(device)
    except (WorkerError, RuntimeError) as error:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"NCCL cannot connect the {parallel.world} GPUs: {first_line(error)}; NCCL_DEBUG=INFO says more",
        ) from error


def open_peers(
    parallel: Parallel,
    device: torch.device,
    model: ModelConfig,
    dtype: torch.dtype,
    max_rows: int,
    custom_all_reduce: bool,
) -> None:
    """Open the GPUs' memory to each other; the log says why if NCCL is used instead."""
    if device.type == "cpu":
        return
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    refusal = None if custom_all_reduce else "is off (--no-custom-all-reduce)"
    if parallel.world > 1:
        reason = refusal or unsupported_reason(parallel.world, model.hidden_size, dtype)
        if reason is None:
            limits = Limits(max_rows, model.hidden_size, dtype, num_multiprocessors, _START_SECONDS)
            reason = _open_all_reduce(parallel, device, limits, is_dense=model.moe is None and model.mla is None)
        _log_peers(parallel, "all-reduce", reason)
    if parallel.experts is not None and model.moe is not None and parallel.everyone.world > 1:
        top_k = model.moe.num_experts_per_token
        reason = refusal or _exchange_refusal(parallel, model.hidden_size, top_k, dtype)
        if reason is None:
            sizes = (max_rows, model.hidden_size, top_k, dtype, num_multiprocessors, _START_SECONDS)
            reason = _open_exchange(parallel, parallel.experts, device, ExchangeLimits(*sizes))
        _log_peers(parallel.everyone, "exchange of rows for experts", reason)


def _log_peers(parallel: Parallel, what: str, reason: str | None) -> None:
    if parallel.rank == 0:
        _log.info("%s: %s", what, "over peers' memory" if reason is None else f"NCCL; the peer kernel {reason}")


def _exchange_refusal(parallel: Parallel, width: int, top_k: int, dtype: torch.dtype) -> str | None:
    if parallel.world > 1:
        return f"takes replicas of one rank, not of {parallel.world}"
    return unsupported_exchange(parallel.everyone.world, width, top_k, dtype)


def _open_all_reduce(parallel: Parallel, device: torch.device, limits: Limits, is_dense: bool) -> str | None:
    """None if every rank could; else why one could not, the same on all."""

    def connect(addresses: list[int]) -> PeerAllReduce:
        return PeerAllReduce(parallel.rank, addresses, limits, device)

    opened, reason = _open_memory(parallel, device, limits.memory_bytes(parallel.world), EMPTY, connect)
    parallel.peers.all_reduce = opened
    if opened is not None and is_dense and limits.max_rows >= LEAST_HIDDEN:
        parallel.peers.copied = _open_copies(parallel, device, limits)
    return reason


def _open_copies(parallel: Parallel, device: torch.device, whole: Limits) -> CopiedAllReduce | None:
    """A block waits for copies alone, so that two share a multiprocessor."""
    limits = dataclasses.replace(whole, max_blocks=2 * whole.max_blocks)

    def connect(addresses: list[int]) -> CopiedAllReduce:
        return CopiedAllReduce(parallel.rank, addresses, limits, device)

    num_bytes = CopiedAllReduce.memory_bytes(limits, parallel.world)
    return _open_memory(parallel, device, num_bytes, 0, connect)[0]


def _open_exchange(
    parallel: Parallel, experts: ExpertParallel, device: torch.device, limits: ExchangeLimits
) -> str | None:
    """As ``_open_all_reduce``, of the group."""
    everyone = parallel.everyone

    def connect(addresses: list[int]) -> ExpertExchange:
        return ExpertExchange(everyone.rank, addresses, limits, device)

    opened, reason = _open_memory(everyone, device, limits.memory_bytes(everyone.world), EMPTY, connect)
    parallel.peers.exchange = experts.peers.exchange = opened
    return reason


def _open_memory(
    parallel: Parallel, device: torch.device, num_bytes: int, word: int, connect: Callable[[list[int]], T]
) -> tuple[T | None, str | None]:
    """What ``connect`` makes of all ranks' memory, filled with ``word``; or why it failed on a rank."""

    def allocate() -> PeerMemory:
        memory = PeerMemory(num_bytes, device)
        memory.fill(word)
        return memory

    if len(set(parallel.exchange(_BOOT_ID.read_bytes()))) > 1:
        return None, "takes GPUs of one host"
    memory, reason = _on_all(parallel, "lacks memory", allocate)
    if memory is None:
        return None, reason
    handles = parallel.exchange(memory.handle())
    return _on_all(
        parallel,
        "cannot open the memory of another GPU",
        lambda: connect(memory.open_all(parallel.rank, handles)),
    )


def _on_all(parallel: Parallel, what: str, attempt: Callable[[], T]) -> tuple[T | None, str | None]:
    """What the attempt gives, or the first rank's reason why it failed somewhere."""
    made, failure = None, ""
    try:
        made = attempt()
    except CudaError as error:
        failure = f"{what}: {error}"
    reasons = [
        each.decode().strip() for each in parallel.exchange(failure.encode()[:_REASON_BYTES].ljust(_REASON_BYTES))
    ]
    reason = next((f"{reason} on rank {rank}" for rank, reason in enumerate(reasons) if reason), None)
    return (made, None) if reason is None else (None, reason)
