"""One MLA layer in a decode step, and its parts, beside what the bytes and sums of the cache allow.

    python tests/bench/gpu/mla/decode_layers.py --out FILE

Random weights of DeepSeek-V2-Lite (16 heads, hidden 2048) and V3 (128 heads, hidden 7168, compressed queries), over
a cache in bfloat16 and, at one KV length, in float8. Each part is captured by itself and replayed, so no launch is
counted twice and none is hidden.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from plait_kernels.kv_cache import FP8, to_cache_dtype
from plait_kernels.mla import AbsorbedQueries, CacheTarget, Tables, absorb_and_cache, up_project_values
from plait_worker.attention.backend import AttentionBackend, BackendRequirements, MlaStep
from plait_worker.attention.registry import names
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MlaShape
from plait_worker.model_config import MlaConfig, ModelConfig, RopeConfig
from plait_worker.models.block import Step
from plait_worker.models.deepseek import MlaAttention
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.weights.dummy import DummyWeights

GPU = torch.device("cuda")
PAGE_SIZE = 64
ROWS, KV_LENGTHS = (1, 32, 128, 512), (1024, 4096, 16_384)
KINDS = ((torch.bfloat16, KV_LENGTHS), (FP8, (4096,)))
FLOOR_PS = {16: 272.0, 128: 364.0}
"""Of a token of context in bfloat16, by heads: 1,152 bytes at 4.24 TB/s, 2,176 operations a head at 765 TFLOP/s."""


def config(num_heads: int) -> ModelConfig:
    hidden, q_rank = (2048, None) if num_heads == 16 else (7168, 1536)
    return ModelConfig(
        architecture="DeepseekV3ForCausalLM",
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=1024,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=64,
        norm_eps=1e-6,
        rope=RopeConfig(1e4),
        max_positions=32_768,
        tie_embeddings=False,
        mla=MlaConfig(q_rank, 512, 128, 64, 128, 192**-0.5, True),
    )


def rows_of(num_rows: int, kv_length: int, num_pages: int) -> Rows:
    """Decode rows of one KV length over scattered pages."""
    width = -(-kv_length // PAGE_SIZE)
    table = torch.randperm(num_pages, device=GPU)[: num_rows * width].view(num_rows, width).to(torch.int32)
    return Rows(
        num_prefill=0,
        slots=list(range(num_rows)),
        starts=[kv_length - 1] * num_rows,
        lengths=[1] * num_rows,
        token_ids_T=torch.zeros(num_rows, dtype=torch.int64, device=GPU),
        positions_T=torch.full((num_rows,), kv_length - 1, device=GPU),
        page_table_RW=table,
        sample_index_S=torch.zeros(0, dtype=torch.int64, device=GPU),
    )


def microseconds(work: Callable[[], object], repeats: int = 30) -> float:
    """Of one replay of the captured work."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats * 1e3


def parts(
    layer: MlaAttention, backend: AttentionBackend[MlaStep], rows: Rows, pages: torch.Tensor, hidden: int
) -> dict[str, float]:
    """Microseconds of the whole layer and of what it consists of."""
    num_rows, heads = rows.num_rows, layer.key_HOL.shape[0]
    x = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device=GPU)
    tables = Tables(*(torch.randn(num_rows, 1, 64, device=GPU) for _ in range(2)))
    attention = backend.prepare(rows)
    step = Step(*tables, attention)
    queries, cached = layer.inputs.split_projection(layer.inputs.first(x))
    q_THE = queries.unflatten(1, (heads, -1))
    q_THC = torch.randn(num_rows, heads, 576, dtype=torch.bfloat16, device=GPU)
    attended, values = q_THC[..., :512].contiguous(), q_THE.new_empty(num_rows, heads, 128)
    cache = CacheTarget(pages, attention.slot_mapping_T, attention.cached_scale)
    entered = (AbsorbedQueries(q_THE, layer.key_HOL), cached, layer._norm, tables, cache)
    quantised = (
        {"queries to float8": microseconds(lambda: to_cache_dtype(q_THC, FP8, 1.0))} if pages.dtype == FP8 else {}
    )
    return quantised | {
        "layer": microseconds(lambda: layer(x, step, pages)),
        "kernel": microseconds(lambda: attention.decode(q_THC, pages)),
        "projections in": microseconds(lambda: layer.inputs.split_projection(layer.inputs.first(x))),
        "absorb, rope, cache write": microseconds(lambda: absorb_and_cache(*entered)),
        "values": microseconds(lambda: up_project_values(attended, layer.value_HVL, values)),
        "projection out": microseconds(lambda: layer.output(values.flatten(1))),
    }


@torch.inference_mode()
def measure(num_heads: int, kind: torch.dtype, kv_lengths: Sequence[int], out: list[dict[str, object]]) -> None:
    model = config(num_heads)
    assert model.mla is not None
    layer = MlaAttention(model, model.mla, DummyWeights(torch.bfloat16, GPU), Parallel())
    num_pages = max(ROWS) * max(kv_lengths) // PAGE_SIZE
    pages = torch.randn(num_pages + 1, PAGE_SIZE, 576, dtype=torch.bfloat16, device=GPU).to(kind)
    shape = mla_shape(num_heads, kind)
    for name in names(MlaShape.kind, (9, 0)):
        backend = try_backend(name, BackendRequirements(shape, PAGE_SIZE, 4096, 8192, GPU))
        if isinstance(backend, str):
            print(name, backend)
            continue
        for num_rows in ROWS:
            for kv_length in kv_lengths:
                figures = parts(layer, backend, rows_of(num_rows, kv_length, num_pages), pages, model.hidden_size)
                case = f"{name}{' float8' if kind == FP8 else ''} {num_heads} heads {num_rows} rows at {kv_length}"
                note(out, case, figures, shape, num_rows * kv_length)


def mla_shape(num_heads: int, kind: torch.dtype) -> MlaShape:
    return MlaShape(num_heads, 512, 576, 192, 128, 192**-0.5, torch.bfloat16, kind)


def note(out: list[dict[str, object]], case: str, figures: dict[str, float], shape: MlaShape, tokens: int) -> None:
    """The figures in microseconds, with the kernel's rates and, in bfloat16, its floor."""
    seconds, num_heads = figures["kernel"] * 1e-6, shape.num_heads
    floor = {"kernel floor": (FLOOR_PS[num_heads] * tokens * 1e-6, "us")} if shape.cached_dtype != FP8 else {}
    rates = floor | {
        "kernel bandwidth": (576 * shape.cached_dtype.itemsize * tokens / seconds / 1e12, "TB/s"),
        "kernel rate": (2176 * num_heads * tokens / seconds / 1e12, "TFLOP/s"),
    }
    print(case, {name: round(value, 1) for name, value in figures.items()}, flush=True)
    out += [{"case": case, "metric": name, "unit": "us", "value": round(value, 2)} for name, value in figures.items()]
    out += [{"case": case, "metric": name, "unit": u, "value": round(value, 3)} for name, (value, u) in rates.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for num_heads, (kind, kv_lengths) in itertools.product((16, 128), KINDS):
        measure(num_heads, kind, kv_lengths, rows)
    if options.out:
        command = "tests/bench/gpu/mla/decode_layers.py"
        options.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
