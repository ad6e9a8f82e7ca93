"""The kernels of MLA and experts agree with their references, up to the rounding of bfloat16."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton; pip install triton")

from plait_kernels.attention import merge, merge_into, merge_triton, split_kv_triton
from plait_kernels.kv_cache import FP8
from plait_kernels.mla import (
    AbsorbedQueries,
    AbsorbedRows,
    CacheTarget,
    MlaNorm,
    Tables,
    absorb,
    absorb_and_cache,
    decode_absorbed,
    decode_triton,
    rope_and_cache,
    schedule_absorbed,
    up_project_values,
)
from plait_kernels.mla import reference as mla_reference
from plait_kernels.moe import GroupLimit, Routing, grouped_gemm_triton, indexed_gemv_triton, route
from plait_kernels.moe import reference as moe_reference
from plait_kernels.moe import routing as routing_reference
from plait_kernels.rope import rope_tables

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu-mla")]
TOLERANCE = 2**-7


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def assert_close(given: Tensor, right: Tensor) -> None:
    error = (given.float() - right.float()).abs().max() / right.float().abs().max()
    assert float(error) <= TOLERANCE


@pytest.mark.parametrize("num_heads", [8, 16, 128])
@pytest.mark.parametrize("num_tokens", [1, 16, 33, 300])
def test_queries_absorb_and_entries_reach_slots_beyond_two_to_the_31_elements(num_tokens: int, num_heads: int) -> None:
    rows = normal(num_tokens, num_heads * 192 + 576)
    q, cached = rows.split([num_heads * 192, 576], dim=1)
    up = normal(num_heads * 256, 512) * 512**-0.5
    key = up.unflatten(0, (num_heads, 256))[:, :128]
    norm = MlaNorm(normal(512), 1e-6)
    frequencies = 1e4 ** (-torch.arange(32, device="cuda") / 32)
    tables = Tables(*rope_tables(torch.arange(num_tokens, device="cuda") * 63, frequencies))
    pages = torch.zeros(60_000, 64, 576, dtype=torch.bfloat16, device="cuda")
    index = pages.shape[0] * 64 - 1 - torch.randperm(4000, device="cuda")[:num_tokens]
    q_THE, cache = q.unflatten(1, (num_heads, 192)), CacheTarget(pages, index)
    right = mla_reference.absorb(q_THE, key, tables)
    entries = mla_reference.make_latent(cached, norm, tables)
    assert_close(absorb_and_cache(AbsorbedQueries(q_THE, key), cached, norm, tables, cache), right)
    assert_close(pages.view(-1, 576)[index], entries)
    assert int((pages != 0).any(dim=-1).sum()) == num_tokens
    assert_close(absorb(q_THE, key, tables), right)
    pages.zero_()
    num_rotated = num_tokens - num_tokens // 3
    rotated = mla_reference.rotate_queries(q_THE, tables)
    right = torch.cat((rotated[:num_rotated], q_THE[num_rotated:]))
    stored, given = rope_and_cache(cached, q_THE[:num_rotated], norm, tables, cache)
    assert_close(stored, entries)
    assert_close(pages.view(-1, 576)[index], entries)
    assert_close(given, right[:num_rotated])
    assert_close(q_THE, right)  # rotated in place, and no others


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_entries_reach_fp8_pages_divided_by_their_scale(num_tokens: int, scale: float) -> None:
    q, key = normal(num_tokens, 16, 192), normal(16, 128, 512) * 512**-0.5
    cached, norm = normal(num_tokens, 576), MlaNorm(normal(512), 1e-6)
    tables = Tables(*rope_tables(torch.arange(num_tokens, device="cuda") * 63, 1e4 ** (-torch.arange(32).cuda() / 32)))
    pages, other, right = (torch.zeros(600, 64, 576, device="cuda").to(FP8) for _ in range(3))
    index = torch.randperm(600 * 64, device="cuda")[:num_tokens]
    entries, _ = mla_reference.rope_and_cache(cached, q, norm, tables, CacheTarget(right, index, scale))
    stored, _ = rope_and_cache(cached, q.clone(), norm, tables, CacheTarget(pages, index, scale))
    assert_close(stored, entries)
    absorb_and_cache(AbsorbedQueries(q, key), cached, norm, tables, CacheTarget(other, index, scale))
    for given in (pages, other):
        torch.testing.assert_close(given.float(), right.float(), rtol=2**-3, atol=2**-9)
    torch.testing.assert_close(right.view(-1, 576)[index].float() * scale, entries.float(), rtol=2**-4, atol=2**-9)


def test_parts_of_a_context_are_merged() -> None:
    a, b = normal(700, 16, 128).float(), normal(700, 16, 128)
    lse_a, lse_b = (torch.randn(700, 16, device="cuda") * 9 for _ in range(2))
    lse_a[5], lse_b[5:7] = -torch.inf, -torch.inf
    right = [part.cuda() for part in merge(a.cpu(), lse_a.cpu(), b.cpu(), lse_b.cpu())]
    b[5:7] = torch.nan
    for given, expected in zip(merge_triton.merge(a, lse_a, b, lse_b), right, strict=True):
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("num_tokens", [1, 3, 700, 8000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_merged_in_place(dtype: torch.dtype, num_tokens: int) -> None:
    combined, lse = normal(8192, 16, 128).to(dtype), torch.randn(8192, 16, device="cuda") * 9
    part, part_lse = normal(num_tokens, 16, 128), torch.randn(num_tokens, 16, device="cuda") * 9
    lse[100], part_lse[0] = -torch.inf, -torch.inf  # the first of these tokens sees nothing of either
    combined[100], part[0] = torch.nan, torch.nan
    own = slice(100, 100 + num_tokens)
    right, right_lse = combined.cpu(), lse.cpu()
    merge_into(right[own], right_lse[own], part.cpu(), part_lse.cpu())
    merge_into(combined[own], lse[own], part, part_lse)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(combined.cpu(), right, atol=1e-5, rtol=rounding)
    torch.testing.assert_close(lse.cpu(), right_lse)
    assert not combined.isnan().any()


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 40])
def test_a_latent_becomes_values_as_the_reference_has_them(num_rows: int) -> None:
    latent, value = normal(num_rows, 8, 512), (normal(8, 320, 576) * 0.05)[:, 192:, :512]
    given = torch.empty(num_rows, 8, 128, dtype=torch.bfloat16, device="cuda")
    up_project_values(latent, value, given)
    assert_close(given, torch.einsum("bhl,hvl->bhv", latent.double(), value.double()))


ROUTINGS = {
    "v2-lite": (64, Routing("softmax", 6, GroupLimit(1, 1), 1.0, num_shared=2)),
    "v2": (160, Routing("softmax", 6, GroupLimit(8, 3), 16.0, num_shared=2)),
    "v3": (256, Routing("sigmoid", 8, GroupLimit(8, 4), 2.5, normalise=True, num_shared=1)),
    "recall-mla": (8, Routing("sigmoid", 2, GroupLimit(4, 2), 1.5, normalise=True)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_agrees_with_the_reference(name: str) -> None:
    num_experts, routing = ROUTINGS[name]
    logits = torch.randn(3000, num_experts, device="cuda")
    bias = torch.randn(num_experts, device="cuda") * 0.3 if routing.scoring == "sigmoid" else None
    weights, experts = route(logits, bias, routing)
    right_weights, right_experts = routing_reference.route(logits, bias, routing)
    # Scores that differ by rounding alone may change order.
    assert float((experts != right_experts).any(dim=1).float().mean()) < 0.001
    same = (experts == right_experts).all(dim=1)
    torch.testing.assert_close(weights[same], right_weights[same], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_that_is_no_number_chooses_different_experts_and_no_weights(name: str) -> None:
    """Were they the same, its pairs would fill that expert's list, which has room for one of each token."""
    num_experts, routing = ROUTINGS[name]
    logits = torch.randn(3, num_experts, device="cuda")
    bias = torch.zeros(num_experts, device="cuda") if routing.scoring == "sigmoid" else None
    right_weights, right_experts = route(logits[1:], bias, routing)
    logits[0] = torch.nan
    weights, experts = route(logits, bias, routing)
    assert len(set(experts[0].tolist())) == experts.shape[1]
    assert 0 <= int(experts[0].min()) <= int(experts[0].max()) < num_experts + routing.num_shared
    assert weights[0, : routing.top_k].isnan().all()
    assert torch.equal(experts[1:], right_experts)
    assert torch.equal(weights[1:], right_weights)


@pytest.mark.parametrize("backend", [indexed_gemv_triton, grouped_gemm_triton], ids=["indexed", "grouped"])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 128, 1024])
@pytest.mark.parametrize(("num_experts", "top_k", "hidden", "width"), [(8, 2, 384, 192), (66, 8, 2048, 1408)])
@pytest.mark.parametrize("routing", ["spread", "same experts"])
def test_experts_agree_with_the_reference(
    backend: object, num_tokens: int, num_experts: int, top_k: int, hidden: int, width: int, routing: str
) -> None:
    x = normal(num_tokens, hidden)
    gate_up, down = normal(num_experts, 2 * width, hidden) * 0.03, normal(num_experts, hidden, width) * 0.03
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    if routing == "same experts":
        logits += torch.arange(num_experts, device="cuda") * 99
    weights, experts = moe_reference.softmax_top_k(logits, top_k, True)
    weights = weights * 0 + 1 / top_k
    given = backend.expert_mlps(x, gate_up, down, weights, experts)  # type: ignore[attr-defined]
    exact = (x.double(), gate_up.double(), down.double())
    assert_close(given, moe_reference.expert_mlps(*exact, weights, experts))


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize(("num_tokens", "hidden", "top_k"), [(64, 2048, 8), (3, 7168, 9), (1500, 2056, 6)])
def test_parts_of_a_token_are_weighted_and_summed(num_tokens: int, hidden: int, top_k: int, has_index: bool) -> None:
    num_pairs, out = num_tokens * top_k, normal(num_tokens, hidden)
    parts, weights = normal(num_pairs, hidden), torch.rand(num_tokens, top_k, device="cuda")
    index = torch.randperm(num_pairs, device="cuda")
    grouped_gemm_triton.combine(parts, weights, out, index if has_index else None)
    ordered = (parts[index] if has_index else parts).unflatten(0, (num_tokens, top_k))
    assert_close(out, torch.einsum("tkh,tk->th", ordered.double(), weights.double()).to(out.dtype))


DECODE_LENGTHS = {
    "one": [1],
    "one short": [192],
    "one long": [100_000],
    "few": [1, 63, 64, 65, 500],
    "even": [192] * 64,
    "many": [*range(1, 600, 2)],
    "skewed": [30_000, *[64] * 40, 1, 2000],
}


@pytest.mark.parametrize("num_heads", [4, 16, 32, 128])
@pytest.mark.parametrize("name", DECODE_LENGTHS)
def test_absorbed_rows_see_their_own_pages(name: str, num_heads: int) -> None:
    check_absorbed_rows(DECODE_LENGTHS[name], num_heads)


@pytest.mark.parametrize("tokens", [32, 64])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_tilings_that_fit_are_right(
    tokens: int, num_warps: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (tokens, num_stages) == (64, 4):
        pytest.skip("three tiles of 64 tokens do not fit into shared memory")
    monkeypatch.setitem(decode_triton.TILINGS, 16, decode_triton.Tiling(tokens, num_warps, num_stages, 1, 64, 2))
    check_absorbed_rows(DECODE_LENGTHS["skewed"], 16)


def check_absorbed_rows(kv_lengths: list[int], num_heads: int) -> None:
    """Twice with one schedule, over pages that end in NaN, replayed at shorter lengths."""
    lengths = torch.tensor(kv_lengths, dtype=torch.int32, device="cuda")
    num_pages = (lengths + 63) // 64
    pages, table = normal(int(num_pages.sum()), 64, 576), torch.zeros(len(lengths), int(num_pages.max()), device="cuda")
    table = table.int()
    table[torch.arange(table.shape[1], device="cuda") < num_pages[:, None]] = torch.randperm(len(pages)).int().cuda()
    for row, length in enumerate(kv_lengths):
        pages[table[row, (length - 1) // 64].long(), (length - 1) % 64 + 1 :] = torch.nan
    q, out = normal(len(lengths), num_heads, 576), normal(len(lengths), num_heads, 512)

    def step() -> None:
        schedule = schedule_absorbed(lengths, q.dtype, 64, num_heads, 512)
        for _layer in range(2):
            decode_absorbed(q, pages, AbsorbedRows(table, lengths, schedule), 0.1, out)

    step()
    assert_close(out, right_rows(q, pages, table, lengths))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    lengths.copy_((lengths + 2) // 3)
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out, right_rows(q, pages, table, lengths))


def right_rows(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    right = torch.empty(*q.shape[:2], 512, dtype=torch.float32, device="cuda")
    mla_reference.decode_absorbed(q.float(), pages, AbsorbedRows(table, lengths, None), 0.1, right)
    return right


def test_steps_of_other_sizes_compile_no_kernel_that_captured_ones_have_not() -> None:
    kernels = split_kv_triton._schedule_kernel, decode_triton._decode_kernel, decode_triton._combine_kernel
    table = torch.zeros(400, 5, dtype=torch.int32, device="cuda")
    pages, lengths = normal(1, 64, 576), torch.full((400,), 300, dtype=torch.int32, device="cuda")

    def num_compiled(first: int, last: int) -> list[int]:
        q, out = normal(last - first, 16, 576), normal(last - first, 16, 512)
        schedule = schedule_absorbed(lengths[first:last], q.dtype, 64, 16, 512)
        decode_absorbed(q, pages, AbsorbedRows(table[first:last], lengths[first:last], schedule), 0.1, out)
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    for num_rows in (1, 64, 256):
        captured = num_compiled(0, num_rows)
    assert min(captured) > 0
    for first, last in ((29, 32), (1, 8), (3, 100), (7, 130), (5, 200)):
        assert num_compiled(first, last) == captured, f"{last - first} rows from row {first}"
