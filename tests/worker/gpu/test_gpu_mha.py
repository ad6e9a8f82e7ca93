"""Every GPU attention backend against float64: scattered pages, lengths around page edges, pages far into the pool."""

import dataclasses
from typing import Any

import pytest
import torch
from plait_kernels.attention import attend, reference
from plait_kernels.kv_cache import UNSCALED, PageScales, as_bytes, to_cache_dtype
from plait_testing.gpu_driver import GPU, PAGE_SIZE, make_rows
from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.registry import names
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MhaShape
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu")]
GPU_BACKENDS = names(MhaShape.kind, (9, 0))
XQA_FP8_GROUPS = (4, 8)
EDGES = [0, 1, 62, 63, 64, 65, 127, 128, 129, 1000]
SHAPES = [(8, 8, 128), (16, 8, 128), (32, 8, 128), (40, 8, 128), (48, 8, 128), (64, 8, 128), (8, 2, 128), (9, 3, 64)]
# Queries, keys and weights of the softmax are bfloat16 in every backend.
TOLERANCE = 0.02
# Over pages of float8 XQA rounds queries and weights to float8 too.
TOLERANCE_XQA_FP8 = 0.08
MAX_TOKENS = 8192


def backend_for(name: str, shape: MhaShape) -> AttentionBackend[Any]:
    if name == "torch":
        return TorchMha(BackendRequirements(shape, PAGE_SIZE, 0, MAX_TOKENS, GPU))
    outcome = try_backend(name, BackendRequirements(shape, PAGE_SIZE, 0, MAX_TOKENS, GPU))
    assert not isinstance(outcome, str), outcome
    return outcome


def error_of(
    backend: AttentionBackend[Any],
    shape: MhaShape,
    starts: list[int],
    lengths: list[int],
    num_prefill: int,
    num_pages: int,
) -> float:
    """Largest difference from float64 over the largest value; what no row may see is 1000."""
    torch.manual_seed(0)
    foul = torch.full((num_pages + 1, 2, shape.num_kv_heads, PAGE_SIZE, shape.head_dim), 1000.0, device=GPU).bfloat16()
    pool = to_cache_dtype(foul, shape.cached_dtype, 1.0)
    free = list(range(num_pages))
    contexts, tables = [], []
    for start, length in zip(starts, lengths, strict=True):
        kv = torch.randn(start + length, 2, shape.num_kv_heads, shape.head_dim, device=GPU).bfloat16()
        table = [free.pop() for _ in range(-(-(start + length) // PAGE_SIZE))]
        torch.tensor(table, device=GPU)
        for position in range(0, start, PAGE_SIZE):
            chunk = kv[position : min(position + PAGE_SIZE, start)]
            page = as_bytes(pool)[table[position // PAGE_SIZE]]
            for part, part_scale in enumerate(shape.scales):
                kept = to_cache_dtype(chunk[:, part], pool.dtype, part_scale)
                page[part, :, : len(chunk)] = as_bytes(kept).transpose(0, 1)
        contexts.append(kv)
        tables.append(table)
    rows = make_rows(tables, num_pages, starts, [[0] * length for length in lengths], num_prefill)
    q = torch.randn(sum(lengths), shape.num_heads, shape.head_dim, device=GPU).bfloat16()
    new = torch.cat([kv[start:] for kv, start in zip(contexts, starts, strict=True)])
    with torch.inference_mode():
        out = backend.prepare(rows).forward(q, new[:, 0], new[:, 1], pool, shape.scales)
    right = expected(q, [as_cached(kv, shape) for kv in contexts], lengths, shape.scale)
    return float((out.double() - right).abs().max() / right.abs().max())


def as_cached(kv: Tensor, shape: MhaShape) -> Tensor:
    """What the pages hold of keys and values ``[L, 2, G, D]``."""
    parts = [
        to_cache_dtype(kv[:, part], shape.cached_dtype, scale).double() * scale
        for part, scale in enumerate(shape.scales)
    ]
    return torch.stack(parts, dim=1)


def expected(q: Tensor, contexts: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    pairs = zip(q.double().split(lengths), (kv.double() for kv in contexts), strict=True)
    return torch.cat([attend(q_row, kv[:, 0], kv[:, 1], scale) for q_row, kv in pairs])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("name", ["torch", *GPU_BACKENDS])
def test_rows_of_all_lengths_see_their_own_past(name: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = MhaShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, torch.bfloat16)
    backend = backend_for(name, shape)
    prefill = [(start, length) for start in (0, 1, 63, 64, 500) for length in (1, 2, 17, 63, 64, 65, 130)]
    mixed = prefill + [(start, 1) for start in EDGES]
    for rows, num_prefill in ((mixed, len(prefill)), (mixed[len(prefill) :], 0), (prefill, len(prefill))):
        starts, lengths = [start for start, _ in rows], [length for _, length in rows]
        assert error_of(backend, shape, starts, lengths, num_prefill, num_pages=400) <= TOLERANCE


@pytest.mark.parametrize("num_short", [3, 70, 300])
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_a_deep_row_among_short_ones_is_read_whole(name: str, num_short: int) -> None:
    shape = MhaShape(32, 8, 128, 128**-0.5, torch.bfloat16)
    starts = [63 + row % 7 for row in range(num_short)] + [9000, 700]
    backend = backend_for(name, shape)
    assert error_of(backend, shape, starts, [1] * len(starts), 0, num_pages=900) <= TOLERANCE
    assert error_of(backend, shape, [30, *starts], [200, *[1] * len(starts)], 1, num_pages=900) <= TOLERANCE


@torch.inference_mode()
def test_few_shallow_rows_beside_a_prompt_go_by_one_call() -> None:
    shape = MhaShape(32, 8, 128, 128**-0.5, torch.bfloat16)
    backend = backend_for("flashinfer", shape)
    starts, lengths = [70, 0, 64, 127, 20], [200, 33, 1, 1, 1]
    step = backend.prepare(make_rows([[0, 1, 2, 3, 4]] * 5, 5, starts, [[0] * length for length in lengths], 2))
    assert step.prefill is not None
    assert step.decode is None
    assert error_of(backend, shape, starts, lengths, 2, num_pages=40) <= TOLERANCE


@pytest.mark.parametrize("name", ["triton", "trtllm_mha"])
@torch.inference_mode()
def test_a_captured_step_follows_the_depths_of_its_replay(name: str) -> None:
    shape, kv_lengths = MhaShape(32, 8, 128, 128**-0.5, torch.bfloat16), [[60] * 69 + [3900], [2000] + [130] * 69]
    backend = backend_for(name, shape)
    pages = torch.randn(4480, 2, 8, PAGE_SIZE, 128, dtype=torch.bfloat16, device=GPU)
    tables = torch.randperm(4480).view(70, 64).tolist()
    layers = torch.randn(2, 70, 32, 128, dtype=torch.bfloat16, device=GPU)
    replayed = make_rows(tables, 0, [0] * 70, [[0]] * 70, 0)
    backend.prepare(replayed).attend(layers[0], pages, UNSCALED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step = backend.prepare(replayed)
        outs = torch.stack([step.attend(q, pages, UNSCALED).clone() for q in layers])  # one output serves all layers
    first: list[torch.Tensor] = []
    for starts in kv_lengths:
        replayed.positions_T.copy_(torch.tensor(starts))
        graph.replay()
        lengths = replayed.positions_T + 1
        for q, out in zip(layers, outs, strict=True):
            right = torch.empty_like(q, dtype=torch.float64)
            reference.decode_paged(q.double(), pages, replayed.page_table_RW, lengths, shape.scale, right, shape.scales)
            assert float((out - right).abs().max() / right.abs().max()) <= TOLERANCE
        first.append(outs.clone())
    # The block that merges a row's splits differs, the result does not; a split of another layer or step would show.
    for _ in range(50):
        for starts, right in zip(kv_lengths, first, strict=True):
            replayed.positions_T.copy_(torch.tensor(starts))
            graph.replay()
            assert torch.equal(outs, right)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_our_kernels_attend_by_themselves(
    num_heads: int, num_kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait_worker.attention.mha.triton_mha.has_fmha_v2", lambda _shape: False)
    shape = MhaShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, torch.bfloat16)
    rows = [(start, length) for start in (0, 1, 63, 500) for length in (1, 2, 17, 64, 130)] + [(1000, 1), (64, 1)]
    starts, lengths = [start for start, _ in rows], [length for _, length in rows]
    assert error_of(backend_for("triton", shape), shape, starts, lengths, 20, num_pages=400) <= TOLERANCE


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (64, 8), (8, 2), (5, 1)])
@pytest.mark.parametrize("scales", [UNSCALED, PageScales(0.37, 2.3)])
@pytest.mark.parametrize("name", ["torch", "triton", "trtllm_mha"])
def test_float8_pages_are_read_with_their_scales(
    name: str, num_heads: int, num_kv_heads: int, scales: PageScales
) -> None:
    if name == "trtllm_mha" and num_heads // num_kv_heads not in XQA_FP8_GROUPS:
        pytest.skip("XQA over float8 is built for groups of 4 and 8")
    shape = MhaShape(num_heads, num_kv_heads, 128, 128**-0.5, torch.bfloat16, is_fp8=True, scales=scales)
    # Made for a layer with other scales, as in a model whose layers differ.
    backend = backend_for(name, dataclasses.replace(shape, scales=PageScales(0.9, 0.8)))
    prefill = [(start, length) for start in (0, 1, 63, 64, 500) for length in (1, 63, 64, 65, 130)]
    mixed = prefill + [(start, 1) for start in EDGES]
    for rows, num_prefill in ((mixed, len(prefill)), (mixed[len(prefill) :], 0), (prefill, len(prefill))):
        starts, lengths = [start for start, _ in rows], [length for _, length in rows]
        tolerance = TOLERANCE_XQA_FP8 if name == "trtllm_mha" else TOLERANCE
        assert error_of(backend, shape, starts, lengths, num_prefill, num_pages=400) <= tolerance


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_pages_whose_elements_lie_beyond_two_to_the_31_are_read(name: str) -> None:
    shape = MhaShape(32, 8, 128, 128**-0.5, torch.bfloat16)
    backend = backend_for(name, shape)
    rows = [(700, 300), (0, 65)], [(1000, 1), (129, 1)]
    starts, lengths = zip(*rows[0], *rows[1], strict=True)
    assert error_of(backend, shape, list(starts), list(lengths), 2, num_pages=40_000) <= TOLERANCE
