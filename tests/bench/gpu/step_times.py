"""Steps of one rank without server or wire: what the host needs to launch one, how long the device takes.

    python tests/bench/gpu/step_times.py FOLDER --rows 1,64,256 --kv-length 192 --out FILE

Random weights of the folder's configuration. Steps are launched one ahead, as in the loop. With `--lone-rank-of N`
the rank is one of N, and its collectives are left out: it takes its own partial sums for the whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from plait_kernels import pdl
from plait_proto import (
    AttentionConfig,
    DeviceConfig,
    KvCacheConfig,
    PageConfig,
    ParallelConfig,
    Plan,
    StepResult,
    Welcome,
    WorkerConfig,
)
from plait_worker import start
from plait_worker.device import open_device
from plait_worker.parallel import Parallel
from plait_worker.rank import InFlight, Rank
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.stepper import Stepper

PAGE_SIZE = 64
STEPS = 40


@dataclass
class Ahead:
    """Launches a step before it takes the one before."""

    rank: Rank
    before: InFlight | None = None
    launch_ms: list[float] = field(default_factory=list)

    def compute(self, plan: Plan) -> StepResult:
        began = time.perf_counter()
        flight = self.rank.launch(plan)
        self.launch_ms.append((time.perf_counter() - began) * 1e3)
        before, self.before = self.before, flight
        # As many tokens as this step's, which is all that the stepper looks at.
        return msgspec.structs.replace((before or flight).result(), step=plan.step)

    def catch_up(self) -> None:
        if self.before is not None:
            self.before.result()
        self.before = None
        self.launch_ms.clear()


class LoneRank(Parallel):
    """Rank 0 of several, of which no other exists."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.world, dim=-1)

    def trade_columns_for_rows(self, part_SU: Tensor) -> Tensor:
        return self.all_gather(part_SU)[: len(self.own_rows(len(part_SU)))]

    def all_max(self, values: Tensor) -> Tensor:
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        return values

    def exchange(self, own: bytes) -> list[bytes]:
        return [own] * self.world


class NoGroup(dist.ProcessGroup):
    """Stands where no collective is called."""


def lone_member(config: WorkerConfig) -> start.Member:
    world = config.parallel.world
    alone = msgspec.structs.replace(config, parallel=ParallelConfig(world=1, dp=1, dp_attention=False))
    device, name = open_device(alone, 0)
    start.open_peers = lambda *_: None  # type: ignore[attr-defined]
    return start.Member(0, device, name, LoneRank(0, world, NoGroup(0, world)))  # type: ignore[call-arg]


def open_rank(
    folder: Path,
    num_seqs: int,
    num_pages: int,
    max_tokens: int,
    attention: str,
    graphs: bool,
    kv_cache_dtype: str,
    world: int = 1,
    quantization: str = "auto",
) -> Rank:
    config = WorkerConfig(
        model=str(folder),
        run_dir=str(folder),
        parallel=ParallelConfig(world=world, dp=1, dp_attention=False),
        device=DeviceConfig(device="cuda", cuda_graphs=graphs, cuda_graph_max_bs=512, custom_all_reduce=True),
        attention=AttentionConfig(attention_backend=attention, mla_context_chunk_size=4096),
        load_format="dummy",
        quantization=quantization,
        dtype="bfloat16",
        kv_cache=KvCacheConfig(kv_cache_dtype=kv_cache_dtype, k_scale=None, v_scale=None),
        pages=PageConfig(page_size=PAGE_SIZE, num_pages=num_pages, memory_fraction=None),
        max_model_len=40_960,
        max_batch_tokens=max_tokens,
        max_seqs=num_seqs,
        draft_tokens=0,
        threads=None,
        log_level="info",
    )
    loaded = start.load(config, start.join_ranks(config, 0) if world == 1 else lone_member(config))
    welcome = Welcome(
        num_slots=num_seqs,
        num_pages=num_pages,
        max_batch_tokens=max_tokens,
        max_rows=num_seqs,
        replica=0,
        num_replicas=1,
        credit=2,
    )
    return start.allocate(loaded, welcome)


def measure(rank: Rank, num_rows: int, kv_length: int) -> dict[str, float]:
    """Decode steps of so many rows with this KV length; milliseconds."""
    ahead = Ahead(rank)
    stepper = Stepper(rank.step, PAGE_SIZE, rank.cache.num_pages)
    slots = [stepper.admit(torch.randint(0, 50_000, (kv_length,)).tolist()) for _ in range(num_rows)]
    per_step = max(1, 8192 // kv_length)
    for first in range(0, num_rows, per_step):
        stepper.step(prefill={slot: kv_length for slot in slots[first : first + per_step]})
    for _ in range(5):
        stepper.step(decode=slots)
    stepper._compute = ahead.compute
    ahead.catch_up()
    stepper.step(decode=slots)
    ahead.launch_ms.clear()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        stepper.step(decode=slots)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - began) * 1e3 / STEPS
    figures = {"step": step_ms, "launch_p50": statistics.median(ahead.launch_ms), "launch_max": max(ahead.launch_ms)}
    kernels = profile(lambda: stepper.step(decode=slots))
    ahead.catch_up()
    stepper._compute = rank.step
    for slot in slots:
        stepper.free(slot)
    stepper.step()
    return figures | kernels


def profile(step: object) -> dict[str, float]:
    """Microseconds of the device in one step, by kernel, the largest first; and its busy share."""
    assert callable(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:70]] += event.device_time_total / 4
    return {f"us {name}": float(us) for name, us in sorted(spent.items(), key=lambda item: -item[1])[:14]} | {
        "us all kernels": float(sum(spent.values()))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--kv-length", type=int, default=192)
    parser.add_argument("--attention", default="trtllm_mha")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-pdl", action="store_true", help="our kernels start when those before them have ended")
    parser.add_argument("--lone-rank-of", type=int, default=1, metavar="N", help="one rank of N, without collectives")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.no_pdl:
        pdl._supports_pdl = lambda _device: False  # type: ignore[assignment]
    counts = [int(count) for count in options.rows.split(",")]
    num_pages = max(counts) * (options.kv_length // PAGE_SIZE + 4) + 64
    rank = open_rank(
        options.folder,
        max(counts),
        num_pages,
        8192,
        options.attention,
        not options.no_graphs,
        options.kv_cache_dtype,
        options.lone_rank_of,
        options.quantization,
    )
    rows: list[dict[str, object]] = []
    for count in counts:
        figures = measure(rank, count, options.kv_length)
        kinds = [options.attention, *["eager"] * options.no_graphs, *["fp8"] * (options.kv_cache_dtype == "fp8")]
        kinds += ["FP8 weights"] * (options.quantization == "fp8")
        kinds += ["no kernel starts early"] * options.no_pdl
        kinds += [f"a lone rank of {options.lone_rank_of}"] * (options.lone_rank_of > 1)
        case = f"decode {count} rows at {options.kv_length}, {', '.join(kinds)}"
        print(case, {name: round(value, 3) for name, value in figures.items()}, flush=True)
        rows += [
            {"case": case, "metric": name, "unit": "us" if name.startswith("us ") else "ms", "value": round(value, 3)}
            for name, value in figures.items()
        ]
    if options.out:
        options.out.write_text(json.dumps({"command": "tests/bench/gpu/step_times.py", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
