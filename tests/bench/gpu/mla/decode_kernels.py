"""The decode kernels of MLA backends, checked against float64 and then timed: by rows and contexts, and by tiling.

    python tests/bench/gpu/mla/decode_kernels.py [--heads 16] [--sweep] [--out FILE]

Each figure is microseconds of one of 27 layers in one graph. Each layer has a cache of its own, as in a step: that of
64 short rows would stay in the L2 cache otherwise. "kernel" is decode alone; "attention" is what a layer has between
its projections: absorption and the cache write, decode, and the values. "prepare" is the host's time for a step.
``--sweep`` times triton_mla for tilings beside the one that it has.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plait_kernels.mla import (
    AbsorbedQueries,
    AbsorbedRows,
    CacheTarget,
    MlaNorm,
    Tables,
    absorb_and_cache,
    decode_triton,
    up_project_values,
)
from plait_kernels.mla import reference as mla_reference
from plait_kernels.mla.decode_triton import Tiling
from plait_worker.attention.backend import AttentionBackend, BackendRequirements, MlaStep
from plait_worker.attention.registry import names
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MlaShape
from plait_worker.rows import Rows
from torch import Tensor
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.gpu.mla.decode_layers import FLOOR_PS, GPU, PAGE_SIZE, microseconds, mla_shape
from bench.gpu.written_result import write_result

NUM_LAYERS = 27
CASES = {
    **{f"{n} rows at {kv}": [kv] * n for n, kv in itertools.product((1, 8, 64, 256), (192, 1100, 4096))},
    "1 row at 30000": [30_000],
    "64 rows at 192, one at 30000": [30_000, *[192] * 63],
}
"""KV lengths of the rows."""
_SHAPES = ((64, 4, 3, 1), (64, 4, 2, 2), (64, 8, 3, 1), (32, 4, 3, 2), (32, 4, 2, 2), (32, 4, 4, 1), (32, 8, 3, 2))
"""Tokens, warps, stages, and programs that share a processor: what fits with 16 heads, without spilled registers."""
_LEAST_TOKENS, _SPLITS_PER_SM = (64, 96, 128, 192), (1, 2, 4)
TOLERANCE = 0.03
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Case:
    """Decode rows over the caches of all layers."""

    shape: MlaShape
    rows: Rows
    caches: list[Tensor]
    q_BHE: Tensor
    q_BHC: Tensor

    @property
    def kv_lengths(self) -> list[int]:
        return [start + 1 for start in self.rows.starts]


def make_case(kv_lengths: list[int], shape: MlaShape, pool: Tensor) -> Case:
    """Scattered pages; the layers' caches lie one after the other in the pool."""
    widths = [-(-kv_length // PAGE_SIZE) for kv_length in kv_lengths]
    num_pages = sum(widths)
    table = torch.zeros(len(kv_lengths), max(widths), dtype=torch.int32)
    table[torch.arange(max(widths)) < torch.tensor(widths)[:, None]] = torch.randperm(num_pages).int()
    starts = [kv_length - 1 for kv_length in kv_lengths]
    rows = Rows(
        num_prefill=0,
        slots=list(range(len(starts))),
        starts=starts,
        lengths=[1] * len(starts),
        token_ids_T=torch.zeros(len(starts), dtype=torch.int64, device=GPU),
        positions_T=torch.tensor(starts, device=GPU),
        page_table_RW=table.to(GPU),
        sample_index_S=torch.zeros(0, dtype=torch.int64, device=GPU),
    )
    caches = list(pool[: NUM_LAYERS * num_pages].view(NUM_LAYERS, num_pages, PAGE_SIZE, -1))
    sizes = (len(starts), shape.num_heads)
    return Case(shape, rows, caches, normal(*sizes, shape.query_dim), normal(*sizes, shape.cached_dim))


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device=GPU)


def check(case: Case, backend: AttentionBackend[MlaStep]) -> float:
    """The error of some rows in the last layer, over the largest value; raises if it is too large."""
    given = backend.prepare(case.rows).decode(case.q_BHC, case.caches[-1])
    some = slice(None, None, -(-len(given) // _CHECKED_ROWS))
    lengths_B = torch.tensor(case.kv_lengths)[some]
    right = given[some].double()
    rows = AbsorbedRows(case.rows.page_table_RW[some], lengths_B, None)
    mla_reference.decode_absorbed(case.q_BHC[some].double(), case.caches[-1], rows, case.shape.scale, right)
    error = float((given[some].double() - right).abs().max() / right.abs().max())
    if not error <= TOLERANCE:
        raise AssertionError(f"{backend.name} is off by {error:.3f} of the largest value")
    return error


def decode_of_layers(case: Case, backend: AttentionBackend[MlaStep]) -> Callable[[], None]:
    step = backend.prepare(case.rows)

    def work() -> None:
        for pages in case.caches:
            step.decode(case.q_BHC, pages)

    return work


def attention_of_layers(case: Case, backend: AttentionBackend[MlaStep]) -> Callable[[], None]:
    step, shape, num_rows = backend.prepare(case.rows), case.shape, case.rows.num_rows
    rope_dim = shape.cached_dim - shape.latent_dim
    key_HOL = normal(shape.num_heads, shape.query_dim - rope_dim, shape.latent_dim) * shape.latent_dim**-0.5
    value_HVL = normal(shape.num_heads, shape.value_dim, shape.latent_dim) * shape.latent_dim**-0.5
    tables = Tables(*(torch.randn(num_rows, 1, rope_dim, device=GPU) for _ in range(2)))
    entries_BC, norm = normal(num_rows, shape.cached_dim), MlaNorm(normal(shape.latent_dim), 1e-6)
    values = normal(num_rows, shape.num_heads, shape.value_dim)

    def work() -> None:
        for pages in case.caches:
            cache, queries = CacheTarget(pages, step.slot_mapping_T), AbsorbedQueries(case.q_BHE, key_HOL)
            q_BHC = absorb_and_cache(queries, entries_BC, norm, tables, cache, next_waits=step.decode_waits)
            up_project_values(step.decode(q_BHC, pages), value_HVL, values)

    return work


def prepare_us(case: Case, backend: AttentionBackend[MlaStep], repeats: int = 50) -> float:
    """The host's time; the device is idle before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        backend.prepare(case.rows)
    return (time.perf_counter() - start) / repeats * 1e6


def figures(case: Case, backend: AttentionBackend[MlaStep]) -> dict[str, float]:
    error = check(case, backend)
    return {
        "kernel": microseconds(decode_of_layers(case, backend), 10) / NUM_LAYERS,
        "attention": microseconds(attention_of_layers(case, backend), 10) / NUM_LAYERS,
        "prepare": prepare_us(case, backend),
        "error": error,
    }


def backends(shape: MlaShape) -> Iterator[AttentionBackend[Any]]:
    """Those that run here."""
    for name in names(MlaShape.kind, (9, 0)):
        backend = try_backend(name, BackendRequirements(shape, PAGE_SIZE, 4096, 8192, GPU))
        if isinstance(backend, str):
            print(name, backend)
        else:
            yield backend


def compare(cases: dict[str, Case], shape: MlaShape, out: list[dict[str, Any]]) -> None:
    """Every backend in every case."""
    for backend in backends(shape):
        for name, case in cases.items():
            floor = FLOOR_PS.get(shape.num_heads, FLOOR_PS[16]) * sum(case.kv_lengths) * 1e-6
            found = figures(case, backend) | {"floor": floor}
            print(f"{backend.name:16} {name:30}", *(f"{key} {value:8.3g}" for key, value in found.items()), flush=True)
            out += [{"case": f"{backend.name} {name}", "metric": key, "value": value} for key, value in found.items()]


def attention_us(case: Case, backend: AttentionBackend[MlaStep]) -> float:
    check(case, backend)
    return microseconds(attention_of_layers(case, backend), 5) / NUM_LAYERS


def sweep(cases: dict[str, Case], shape: MlaShape, out: list[dict[str, Any]]) -> None:
    """The attention of triton_mla by tiling: microseconds of each case, and their geometric mean; the best last."""
    backend = next(each for each in backends(shape) if each.name == "triton_mla")
    heads = max(16, 1 << (shape.num_heads - 1).bit_length())
    own, means = decode_triton.TILINGS[heads], []
    print("tokens, warps, stages, programs, least tokens, splits a processor:", *cases, sep=" | ")
    for compiled, least, splits in itertools.product(_SHAPES, _LEAST_TOKENS, _SPLITS_PER_SM):
        if least % compiled[0]:
            continue
        tiling = decode_triton.TILINGS[heads] = Tiling(*compiled, least, splits)
        try:
            found = [attention_us(case, backend) for case in cases.values()]
        except OutOfResources as failure:  # another Triton may keep more tiles in shared memory
            print(tuple(tiling), failure, flush=True)
            continue
        for name, value in zip(cases, found, strict=True):
            out.append({"case": f"{tuple(tiling)} {name}", "metric": "attention", "value": value})
        means.append((math.exp(sum(map(math.log, found)) / len(found)), tiling))
        print(tuple(tiling), *(f"{each:7.2f}" for each in found), f"mean {means[-1][0]:.2f}", flush=True)
    decode_triton.TILINGS[heads] = own
    for mean, tiling in sorted(means, reverse=True)[-5:]:
        print(f"{mean:.2f}", tiling)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape, out = mla_shape(options.heads, torch.bfloat16), list[dict[str, Any]]()
    most = max(sum(-(-kv_length // PAGE_SIZE) for kv_length in kv_lengths) for kv_lengths in CASES.values())
    pool = normal(NUM_LAYERS * most, PAGE_SIZE, shape.cached_dim)
    cases = {name: make_case(kv_lengths, shape, pool) for name, kv_lengths in CASES.items()}
    compare(cases, shape, out)
    if options.sweep:
        sweep(cases, shape, out)
    if options.out:
        rows = [row | {"unit": "1" if row["metric"] == "error" else "us"} for row in out]
        write_result(options.out, "mla/decode_kernels.py", rows)


if __name__ == "__main__":
    main()
