"""The all-reduce with sum and norm between GPUs, ours and NCCL's in CUDA graphs; the rates of their links: one JSON.

    python tests/bench/gpu/all_reduce.py --world 2 --out FILE

One process a GPU. A graph holds 20 reductions one after the other. Results are compared with NCCL's first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plait.bench.result_file import commit, machine, versions
from plait_kernels.collective import EMPTY, Limits, PeerAllReduce, PeerMemory
from plait_kernels.norm import add_rms_norm
from plait_kernels.nvrtc import Kernel, check, compile_source
from plait_worker.rendezvous import forbid_multicast
from torch import Tensor

ROWS = (1, 2, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EPS = 1e-6
REDUCTIONS, REPLAYS = 20, 9
LINK_BYTES = 256 << 20
LINK_SOURCE = b"""
typedef long long Long;
extern "C" __global__ void copy(uint4* to, const uint4* from, Long num) {
    const Long stride = gridDim.x * (Long)blockDim.x;
    for (Long i = blockIdx.x * (Long)blockDim.x + threadIdx.x; i < num; i += stride) to[i] = from[i];
}
extern "C" __global__ void bounce(volatile unsigned* mine, volatile unsigned* theirs, Long first, Long rounds) {
    for (unsigned round = 1; round <= rounds; ++round) {
        if (first) *theirs = round;
        while (*mine != round) {}
        if (!first) *theirs = round;
    }
}
"""
LIBRARIES = ("plait", "torch")


class Gpu:
    """One rank."""

    def __init__(self, rank: int, world: int, store: str) -> None:
        self.rank, self.world = rank, world
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        file = dist.FileStore(store, world)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=file, rank=rank, world_size=world, timeout=timedelta(seconds=90)
        )
        dist.all_reduce(torch.ones(1, device=self.device))
        self.rows: list[dict[str, Any]] = []

    def exchange(self, own: bytes) -> list[bytes]:
        given = torch.frombuffer(bytearray(own.ljust(64, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(given) for _ in range(self.world)]
        dist.all_gather(rows, given)
        return [bytes(row.tolist()) for row in rows]

    def note(self, case: str, metric: str, unit: str, value: float) -> None:
        self.rows.append({"case": case, "metric": metric, "unit": unit, "value": round(value, 3), "goal": None})
        if self.rank == 0:
            print(self.rows[-1], flush=True)

    def memory(self, num_bytes: int) -> tuple[PeerMemory, list[int]]:
        """Own memory, empty, and every rank's address."""
        memory = PeerMemory(num_bytes, self.device)
        memory.fill(EMPTY)
        addresses = memory.open_all(self.rank, self.exchange(memory.handle()))
        self.exchange(b"")
        return memory, addresses

    def graph_us(self, compute: Callable[[], object]) -> float:
        """Microseconds of one of the graph's reductions, the median over replays that all ranks start together."""
        compute()
        torch.cuda.synchronize()
        self.exchange(b"")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REDUCTIONS):
                compute()
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            self.exchange(b"")
            graph.replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / REDUCTIONS / 3)
        return statistics.median(times)


def measure_links(gpu: Gpu) -> None:
    """Copies by kernels that push and that read, of one direction and of both, by the copy engine; a round trip."""
    kernels = link_kernels(gpu.device)
    _, addresses = gpu.memory(LINK_BYTES)
    peer, own = addresses[(gpu.rank + 1) % gpu.world], torch.zeros(LINK_BYTES, dtype=torch.uint8, device=gpu.device)
    num = LINK_BYTES // 16

    def timed(run: Callable[[], object]) -> float:
        run()
        torch.cuda.synchronize()
        gpu.exchange(b"")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        gpu.exchange(b"")
        return LINK_BYTES * 5 / begin.elapsed_time(end) / 1e6

    def nothing() -> None:
        """The other direction's rank only takes part in the exchanges."""

    for blocks in (16, 32, 66, 132, 264):
        for name, arguments in (("push", (peer, own, num)), ("read", (own, peer, num))):
            run = partial(kernels["copy"], (blocks, 1024, 0), *arguments)
            gpu.note(f"{name}, {blocks} blocks, both directions", "rate", "GB/s", timed(run))
            gpu.note(f"{name}, {blocks} blocks, one direction", "rate", "GB/s", timed(nothing if gpu.rank else run))
    for name, to, source in (("push", peer, own.data_ptr()), ("read", own.data_ptr(), peer)):
        run = partial(copy_by_engine, to, source)
        gpu.note(f"{name}, copy engine, both directions", "rate", "GB/s", timed(run))
        gpu.note(f"{name}, copy engine, one direction", "rate", "GB/s", timed(nothing if gpu.rank else run))
    rounds = 1000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    gpu.exchange(b"")
    for _ in range(2):
        _, flags = gpu.memory(4096)
        begin.record()
        kernels["bounce"]((1, 1, 0), flags[gpu.rank], flags[(gpu.rank + 1) % gpu.world], int(gpu.rank == 0), rounds)
        end.record()
        end.synchronize()
    gpu.note("a word there and back", "time", "us", begin.elapsed_time(end) * 1000 / rounds)


def copy_by_engine(to: int, source: int) -> None:
    from cuda.bindings import driver

    check(driver.cuMemcpyAsync(to, source, LINK_BYTES, torch.cuda.current_stream().cuda_stream))


def link_kernels(device: torch.device) -> dict[str, Kernel]:
    from cuda.bindings import driver

    image = compile_source(LINK_SOURCE, "links.cu", (), torch.cuda.get_device_capability(device))
    module = driver.cuModuleLoadData(image)[1]
    return {name: Kernel(driver.cuModuleGetFunction(module, name.encode())[1], 0) for name in ("copy", "bounce")}


def measure_reductions(gpu: Gpu, width: int, limits: Limits, with_nccl: bool) -> None:
    """NCCL alone, NCCL and then the norm, and ours."""
    dtype = limits.dtype
    _, addresses = gpu.memory(limits.memory_bytes(gpu.world))
    ours = PeerAllReduce(gpu.rank, addresses, limits, gpu.device)
    gpu.exchange(b"")
    torch.manual_seed(98)
    weight = torch.rand(width, device=gpu.device, dtype=dtype)
    for num_rows in ROWS:
        case = f"{num_rows} x {width}"
        torch.manual_seed(gpu.rank)
        own = torch.randn(num_rows, width, device=gpu.device, dtype=dtype)
        torch.manual_seed(99)
        residual = torch.randn(num_rows, width, device=gpu.device, dtype=dtype)
        gpu.note(case, "largest_error", "of the largest", error(gpu, ours, own, residual, weight))
        scratch = own.clone()
        if with_nccl:
            gpu.note(case, "nccl", "us", gpu.graph_us(partial(dist.all_reduce, scratch)))
            gpu.note(case, "nccl_and_norm", "us", gpu.graph_us(partial(reduced, scratch, residual, weight)))
        run = partial(ours.add_rms_norm, own, residual, weight, EPS)
        gpu.note(case, f"ours, {limits.max_blocks} blocks", "us", gpu.graph_us(run))
        if ours.lost is not None:
            raise SystemExit(f"{case}: {ours.lost}")


def reduced(scratch: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dist.all_reduce(scratch)
    return add_rms_norm(scratch, residual, weight, EPS)


def error(gpu: Gpu, ours: PeerAllReduce, own: Tensor, residual: Tensor, weight: Tensor) -> float:
    """Against NCCL's sum in float32; infinite if the ranks' bits differ."""
    normed, total = ours.add_rms_norm(own, residual, weight, EPS)
    right = own.float()
    dist.all_reduce(right)
    right += residual.float()
    others = [torch.empty_like(normed) for _ in range(gpu.world)]
    dist.all_gather(others, normed)
    torch.cuda.synchronize()
    if not all(torch.equal(other, normed) for other in others):
        return float("inf")
    return float((total.float() - right).abs().max() / right.abs().max())


def run_rank(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    forbid_multicast()
    gpu = Gpu(rank, world, str(Path(folder) / "store"))
    if not options.only_ours:
        measure_links(gpu)
    for number, num_blocks in enumerate(options.blocks):
        limits = Limits(max(ROWS), options.width, torch.bfloat16, num_blocks, spin_seconds=20)
        measure_reductions(gpu, options.width, limits, number == 0 and not options.only_ours)
        if rank == 0:
            write(gpu, options.out)
    torch.cuda.synchronize()
    gpu.exchange(b"")
    os._exit(0)


def write(gpu: Gpu, out: Path) -> None:
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/all_reduce.py", *sys.argv[1:]]),
        "machine": {"gpu": torch.cuda.get_device_name(), "gpus": gpu.world} | machine(),
        "versions": versions(LIBRARIES),
        "rows": gpu.rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--blocks", type=int, nargs="+", default=[132], help="of a launch of ours at most")
    parser.add_argument("--only-ours", action="store_true", help="neither links nor NCCL")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options.world, folder, options), nprocs=options.world, join=True)


if __name__ == "__main__":
    main()
