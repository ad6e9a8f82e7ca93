"""The Triton kernels agree with their references in Triton's interpreter.

It runs them on a CPU, so the arithmetic and the masks are tried where no GPU is; where there is one, tests/kernels/gpu
tries the compiled kernels instead.
"""

import os

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU is here, which runs the compiled kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, and Triton's own are when it is imported
pytest.importorskip("triton", reason="no Triton; pip install triton")

from plait_kernels.activation import reference as activation_reference
from plait_kernels.activation import triton as activation_triton
from plait_kernels.attention import (
    PagedPrefill,
    decode_triton,
    merge,
    merge_into,
    merge_triton,
    prefill_triton,
    split_kv_triton,
)
from plait_kernels.attention import reference as attention_reference
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales, slot_mapping, slot_mapping_triton
from plait_kernels.kv_cache import reference as cache_reference
from plait_kernels.kv_cache import triton as cache_triton
from plait_kernels.linear import RowNorm, Tile, gemv_triton, router_gemm_triton, router_gemv_triton, skinny_gemm_triton
from plait_kernels.linear import reference as linear_reference
from plait_kernels.mla import AbsorbedQueries, CacheTarget, MlaNorm, Tables, values_triton
from plait_kernels.mla import reference as mla_reference
from plait_kernels.mla import triton as mla_triton
from plait_kernels.moe import (
    GroupLimit,
    Routing,
    first_rows_triton,
    grouped_gemm_torch,
    grouped_gemm_triton,
    indexed_gemv_triton,
    routing_triton,
)
from plait_kernels.moe import reference as moe_reference
from plait_kernels.moe import routing as routing_reference
from plait_kernels.norm import reference as norm_reference
from plait_kernels.norm import triton as norm_triton
from plait_kernels.rope import HeadNorm, rope_tables, tables_triton
from plait_kernels.rope import reference as rope_reference
from plait_kernels.rope import triton as rope_triton
from plait_kernels.sampling import reference as sampling_reference
from plait_kernels.sampling import triton as sampling_triton


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def assert_close(given: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(given, right, atol=2e-5, rtol=2e-5)


def tables(num_tokens: int, width: int) -> Tables:
    frequencies = 1e4 ** (-torch.arange(width // 2) / (width // 2))
    return Tables(*rope_tables(torch.arange(num_tokens) * 7, frequencies))


# Widths that fill their blocks, and ones that do not.
MLA_SHAPES = [(1, 2, 16, 32, 8), (5, 3, 24, 40, 16), (33, 1, 16, 160, 4)]


@pytest.mark.parametrize(("num_tokens", "num_heads", "nope_dim", "width", "rotary_dim"), MLA_SHAPES)
def test_queries_absorb_and_entries_reach_their_slots(
    num_tokens: int, num_heads: int, nope_dim: int, width: int, rotary_dim: int
) -> None:
    rows = torch.randn(num_tokens, num_heads * (nope_dim + rotary_dim) + width + rotary_dim)
    q, cached = rows.split([num_heads * (nope_dim + rotary_dim), width + rotary_dim], dim=1)
    key = torch.randn(num_heads, nope_dim + 3, width)[:, :nope_dim]
    queries = AbsorbedQueries(q.unflatten(1, (num_heads, -1)), key)
    norm, cos_sin = MlaNorm(torch.rand(width) + 0.5, 1e-6), tables(num_tokens, rotary_dim)
    index = torch.randperm(12 * 4)[:num_tokens]
    pages = torch.full((12, 4, width + rotary_dim), 9.0)
    right_pages = pages.clone()
    right = mla_reference.absorb_and_cache(queries, cached, norm, cos_sin, CacheTarget(right_pages, index))
    assert_close(mla_triton.absorb_and_cache(queries, cached, norm, cos_sin, CacheTarget(pages, index), False), right)
    assert_close(pages, right_pages)
    assert_close(mla_triton.absorb(*queries, cos_sin, True), right)
    pages.fill_(9.0)
    num_rotated = num_tokens - num_tokens // 3
    rotated = mla_reference.rotate_queries(queries.q_BHE, cos_sin)
    right_q = torch.cat((rotated[:num_rotated], queries.q_BHE[num_rotated:]))
    first = queries.q_BHE[:num_rotated]
    stored, given = mla_triton.rope_and_cache(cached, first, norm, cos_sin, CacheTarget(pages, index))
    assert_close(stored, right_pages.view(-1, width + rotary_dim)[index])
    assert_close(pages, right_pages)
    assert_close(given, right_q[:num_rotated])
    assert_close(queries.q_BHE, right_q)  # rotated in place, and no others


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_entries_reach_fp8_pages_divided_by_their_scale(scale: float) -> None:
    cached, norm, cos_sin, index = (
        torch.randn(5, 40),
        MlaNorm(torch.rand(32) + 0.5, 1e-6),
        tables(5, 8),
        torch.arange(5),
    )
    cached[3, :32] *= 1e-3  # the norm makes it large again
    norm.weight_L[7] = 1e4  # beyond what float8 holds
    pages, right = (torch.zeros(2, 4, 40).to(FP8) for _ in range(2))
    no_q = torch.empty(0, 1, 8)
    copied, _ = mla_triton.rope_and_cache(cached, no_q, norm, cos_sin, CacheTarget(pages, index, scale))
    right_copied, _ = mla_reference.rope_and_cache(cached, no_q, norm, cos_sin, CacheTarget(right, index, scale))
    assert_close(copied, right_copied)
    differs = (pages.float() - right.float()).abs() > 2**-3 * right.float().abs() + 2**-9
    assert differs.float().mean() < 0.05  # the interpreter does not carry a mantissa that it rounds up
    assert pages.float().abs().max() == 448


@pytest.mark.parametrize("empty", ["neither", "first", "second", "both"])
def test_parts_of_a_context_are_merged_and_an_empty_part_is_not_read(empty: str) -> None:
    a, b = torch.randn(5, 3, 24), torch.randn(5, 3, 24)
    lse_a, lse_b = torch.randn(5, 3) * 9, torch.randn(5, 3) * 9
    parts = {"neither": [], "first": [(a, lse_a)], "second": [(b, lse_b)], "both": [(a, lse_a), (b, lse_b)]}
    for _, lse in parts[empty]:
        lse[2] = -torch.inf
    right = merge(a, lse_a, b, lse_b)
    for out, _ in parts[empty]:
        out[2] = torch.nan
    for joined in (merge_triton.merge, merge):
        for given, expected in zip(joined(a, lse_a, b, lse_b), right, strict=True):
            assert_close(given, expected)
    for join in (merge_triton.merge_into, merge_into):
        both = a.clone(), lse_a.clone()
        join(*both, b, lse_b)
        for given, expected in zip(both, right, strict=True):
            assert_close(given, expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_part_is_merged_in_place_into_some_tokens_in_their_dtype(num_tokens: int) -> None:
    joined, lse = torch.randn(9, 3, 24).bfloat16(), torch.randn(9, 3)
    part, part_lse = torch.randn(num_tokens, 3, 24).bfloat16(), torch.randn(num_tokens, 3)
    own = slice(1, 1 + num_tokens)
    right, right_lse = joined.clone(), lse.clone()
    right_own, right_lse[own] = merge(joined[own], lse[own], part, part_lse)
    right[own] = right_own.bfloat16()
    for join in (merge_triton.merge_into, merge_into):
        given, given_lse = joined.clone(), lse.clone()
        join(given[own], given_lse[own], part, part_lse)
        torch.testing.assert_close(given, right, atol=2**-8, rtol=2**-7)  # the interpreter rounds bfloat16 differently
        assert_close(given_lse, right_lse)


@pytest.mark.usefixtures("loops_over_loaded_bounds")
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize(
    ("kv_lengths", "most"),
    [
        ([900] * 9, 1),
        ([1] * 600 + [20_000], 3),
        ([40] * 12 + [9000], 7),
        ([300, 64, 65, 1] * 3 + [2500], 5),
        ([10**5, *[1] * 40], 8),
    ],
)
def test_long_rows_are_split_and_each_page_is_in_one_split(
    kv_lengths: list[int], most: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_kv_triton, "fixed_num_splits", lambda _programs, _device: 1)
    monkeypatch.setattr(split_kv_triton, "num_sms", lambda _device: 2 * num_kv_heads)
    lengths = torch.tensor(kv_lengths, dtype=torch.int32)
    schedule = split_kv_triton.schedule_split_kv(lengths, 64, 4 * num_kv_heads, num_kv_heads, 32)
    assert schedule is not None
    found = [entry for entry in schedule.splits_J4.tolist() if entry[0] >= 0]
    counts = [sum(row == each for row, *_ in found) for each in range(len(kv_lengths))]
    assert found == [
        [row, split, counts[row], kv_lengths[row]] for row in range(len(kv_lengths)) for split in range(counts[row])
    ]
    assert schedule.splits_J4[len(found) :, 0].eq(-1).all()
    assert schedule.num_done_JG.eq(0).all()
    assert (min(counts), max(counts)) == (1, most)


KV_LENGTHS = {
    "even": [33] * 9,
    "page edges": [1, 15, 16, 17, 31, 32, 33, 1, 300],
    "one long": [1, 20, 1400, 5, 16],
    "random": [20, 30, 140, 10, 50, 35, 1],
}
SPLIT_CASES = [
    *((num_sms, kv_lengths, (8, 2), UNSCALED) for num_sms in (2, 40) for kv_lengths in KV_LENGTHS),
    *((40, "random", heads, UNSCALED) for heads in ((3, 1), (4, 4))),
    (40, "random", (8, 2), PageScales(0.37, 2.3)),
]
"""Processors, KV lengths, heads and scales."""


@pytest.mark.usefixtures("loops_over_loaded_bounds")
@pytest.mark.parametrize(("num_sms", "name", "heads", "scales"), SPLIT_CASES)
def test_decode_rows_see_their_own_pages_whatever_their_splits(
    num_sms: int, name: str, heads: tuple[int, int], scales: PageScales, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decode_triton, split_kv_triton):
        monkeypatch.setattr(module, "num_sms", lambda _device: num_sms)
    monkeypatch.setattr(split_kv_triton, "_MAX_FIXED_SPLITS", 64)
    kv_lengths, width, (num_heads, num_kv_heads) = KV_LENGTHS[name], 32, heads
    lengths = torch.tensor(kv_lengths, dtype=torch.int32)
    pages = torch.randn(sum(-(-kv_length // 16) for kv_length in kv_lengths), 2, num_kv_heads, 16, width)
    table = torch.zeros(len(kv_lengths), max(-(-kv_length // 16) for kv_length in kv_lengths), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < (lengths[:, None] + 15) // 16] = torch.randperm(len(pages)).int()
    for row, kv_length in enumerate(kv_lengths):  # past the row's end: must not be seen
        pages[table[row, (kv_length - 1) // 16].long(), :, :, (kv_length - 1) % 16 + 1 :] = 400.0
    pages = pages if scales == UNSCALED else pages.to(FP8)
    split_kv = split_kv_triton.schedule_split_kv(lengths, 16, num_heads, num_kv_heads, width)
    assert split_kv is not None
    for _layer in range(2):
        q = torch.randn(len(kv_lengths), num_heads, width)
        right, alike, by_length = (torch.full_like(q, torch.nan) for _ in range(3))
        attention_reference.decode_paged(q, pages, table, lengths, 0.2, right, scales)
        decode_triton.decode_paged(q, pages, table, lengths, 0.2, alike, scales)
        split_kv.partial_JHD.fill_(torch.nan)
        split_kv_triton.decode_split_kv(q, pages, table, split_kv, 0.2, by_length, scales)
        assert_close(alike, right)
        assert_close(by_length, right)
        assert split_kv.num_done_JG.eq(0).all()


ROUTINGS = {
    "v2-lite": (16, Routing("softmax", 6, GroupLimit(1, 1), 1.0, num_shared=2)),
    "v2": (40, Routing("softmax", 6, GroupLimit(8, 3), 16.0, num_shared=2)),
    "v3": (32, Routing("sigmoid", 8, GroupLimit(8, 4), 2.5, normalise=True, num_shared=1)),
    "v3 without a shared expert": (12, Routing("sigmoid", 3, GroupLimit(4, 2), 1.5)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_agrees_with_the_reference(name: str) -> None:
    num_experts, routing = ROUTINGS[name]
    logits = torch.randn(20, num_experts)
    bias = torch.randn(num_experts) * 0.3 if routing.scoring == "sigmoid" else None
    weights, experts = routing_triton.route(logits, bias, routing)
    right_weights, right_experts = routing_reference.route(logits, bias, routing)
    assert torch.equal(experts, right_experts)
    assert_close(weights, right_weights)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_that_is_no_number_chooses_different_experts_and_no_weights(name: str) -> None:
    """Were they the same, its pairs would fill that expert's list, which has room for one of each token."""
    num_experts, routing = ROUTINGS[name]
    logits = torch.randn(3, num_experts)
    bias = torch.zeros(num_experts) if routing.scoring == "sigmoid" else None
    right_weights, right_experts = routing_triton.route(logits[1:], bias, routing)
    logits[0] = torch.nan
    weights, experts = routing_triton.route(logits, bias, routing)
    assert len(set(experts[0].tolist())) == experts.shape[1]
    assert 0 <= int(experts[0].min()) <= int(experts[0].max()) < num_experts + routing.num_shared
    assert weights[0, : routing.top_k].isnan().all()
    assert torch.equal(experts[1:], right_experts)
    assert torch.equal(weights[1:], right_weights)


@pytest.mark.parametrize("backend", [indexed_gemv_triton, grouped_gemm_triton])
@pytest.mark.parametrize(("num_tokens", "hidden", "width"), [(1, 32, 16), (3, 24, 12), (19, 32, 16)])
@pytest.mark.parametrize("routing", ["spread", "one expert"])
def test_experts_agree_with_the_reference(
    backend: object, num_tokens: int, hidden: int, width: int, routing: str
) -> None:
    x, gate_up, down = torch.randn(num_tokens, hidden), torch.randn(5, 2 * width, hidden), torch.randn(5, hidden, width)
    weights, experts = moe_reference.softmax_top_k(torch.randn(num_tokens, 5), 2, True)
    if routing == "one expert":
        experts = torch.stack((torch.full_like(experts[:, 0], 4), torch.zeros_like(experts[:, 0])), dim=1)
    right = moe_reference.expert_mlps(x, gate_up, down, weights, experts)
    given = backend.expert_mlps(x, gate_up, down, weights, experts)  # type: ignore[attr-defined]
    torch.testing.assert_close(given, right, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "hidden", "top_k"), [(1, 24, 1), (5, 520, 3), (2, 512, 8), (1025, 264, 2)])
@pytest.mark.parametrize("has_index", [False, True])
def test_parts_of_a_token_are_weighted_and_summed(num_tokens: int, hidden: int, top_k: int, has_index: bool) -> None:
    parts, weights = torch.randn(num_tokens * top_k, hidden), torch.rand(num_tokens, top_k)
    index, out = torch.randperm(num_tokens * top_k), torch.empty(num_tokens, hidden)
    grouped_gemm_triton.combine(parts, weights, out, index if has_index else None)
    ordered = parts[index] if has_index else parts
    assert_close(out, torch.einsum("tkh,tk->th", ordered.unflatten(0, (num_tokens, top_k)), weights))


@pytest.mark.parametrize("num_experts", [8, 64, 256, 257])
@pytest.mark.parametrize("routing", ["spread", "the same experts", "every other expert empty"])
def test_experts_of_many_tokens_are_grouped_gemms(num_experts: int, routing: str) -> None:
    x = torch.randn(150, 64).bfloat16()
    gate_up, down = torch.randn(num_experts, 64, 64).bfloat16() / 8, torch.randn(num_experts, 64, 32).bfloat16() / 6
    logits = torch.randn(150, num_experts)
    if routing == "the same experts":
        logits += 9 * torch.arange(num_experts)
    elif routing == "every other expert empty":
        logits[:, 1::2] -= 99
    weights, experts = moe_reference.softmax_top_k(logits, 4, True)
    right = moe_reference.expert_mlps(x.double(), gate_up.double(), down.double(), weights, experts)
    given = grouped_gemm_torch.expert_mlps(x, gate_up, down, weights, experts)
    torch.testing.assert_close(given.double(), right, atol=float(right.abs().max()) / 64, rtol=0)


@pytest.mark.parametrize(("num_rows", "splits"), [(2, 1), (17, 4), (64, 2)])
def test_the_last_program_adds_the_splits_of_a_skinny_gemm(num_rows: int, splits: int) -> None:
    x, weight, tile = torch.randn(num_rows, 512), torch.randn(192, 512) / 23, Tile(64, 64, splits, 3, 4)
    assert tile.fits_matrix(192, 512)
    for _ in range(2):  # the second call uses the counters of the first
        assert_close(skinny_gemm_triton.skinny_gemm(x, weight, tile), x @ weight.T)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 64), (12, 96)])
def test_a_router_normalises_its_input(num_outputs: int, num_inputs: int) -> None:
    x, weight = torch.randn(1, num_inputs), torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    norm = RowNorm(torch.randn(1, num_inputs), torch.rand(num_inputs) + 0.5, 1e-6)
    given = router_gemv_triton.rmsnorm_router_gemv(x, norm, weight)
    for part, right in zip(given, linear_reference.rmsnorm_router_gemv(x, norm, weight), strict=True):
        assert_close(part, right)
    assert_close(router_gemv_triton.router_gemv(x, weight), x @ weight.T)


@pytest.mark.parametrize("num_rows", [0, 2, 8, 19])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 48), (40, 256), (16, 1000)])
def test_a_router_multiplies_a_few_rows(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    x[num_rows // 2 :, 0] = torch.nan
    given, right = (module.router_gemm(x, weight) for module in (router_gemm_triton, linear_reference))
    torch.testing.assert_close(given, right, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize(("num_rows", "num_heads", "value_dim", "width"), [(1, 2, 16, 32), (4, 3, 12, 40)])
def test_a_latent_of_a_few_rows_becomes_each_head_s_values(
    num_rows: int, num_heads: int, value_dim: int, width: int
) -> None:
    latent, whole = torch.randn(num_rows, num_heads, width), torch.randn(num_heads, value_dim + 5, width + 8)
    value = whole[:, 5:, :width]  # a half of the matrix, as it is held
    given, right = (torch.empty(num_rows, num_heads, value_dim) for _ in range(2))
    values_triton.up_project_values(latent, value, given)
    mla_reference.up_project_values(latent, value, right)
    assert_close(given, right)


@pytest.mark.parametrize("num", [8, 24])
@pytest.mark.parametrize("scale", [1.0, 0.7, None], ids=["one", "scaled", "a scale each"])
def test_rope_tables_of_far_positions_are_those_of_torch(num: int, scale: float | None) -> None:
    positions, frequencies = torch.tensor([0, 1, 37, 163_839]), 1e4 ** (-torch.arange(num) / num)
    factor = torch.rand(num) if scale is None else scale
    given = tables_triton.rope_tables(positions, frequencies, factor)
    for part, right in zip(given, rope_tables(positions, frequencies, factor), strict=True):
        assert_close(part, right)


@pytest.mark.parametrize("has_rows", [False, True])
def test_the_slot_mapping_follows_the_rows_page_tables(has_rows: bool) -> None:
    table = torch.randint(2**20, (150, 12), dtype=torch.int32)[:, :8]
    positions = torch.randint(8 * 64, (150,))
    row = torch.randint(150, (150,)) if has_rows else None
    right = slot_mapping(table, row, positions, 64)
    rows = torch.arange(150) if row is None else row
    assert torch.equal(right, table[rows, positions // 64] * 64 + positions % 64)
    assert torch.equal(slot_mapping_triton.slot_mapping(table, row, positions, 64), right)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 96), (6, 130), (64, 4096)])
def test_gemv_and_what_is_fused_into_it(num_outputs: int, num_inputs: int) -> None:
    x, weight = torch.randn(1, num_inputs), torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    norm = RowNorm(torch.randn(1, num_inputs), torch.rand(num_inputs), 1e-6)
    assert_close(gemv_triton.gemv(x, weight), linear_reference.gemv(x, weight))
    assert_close(gemv_triton.gate_up_silu(x, weight), linear_reference.gate_up_silu(x, weight))
    for name in ("rmsnorm_gemv", "rmsnorm_gate_up_silu"):
        given, right = (getattr(module, name)(x, norm, weight) for module in (gemv_triton, linear_reference))
        for part, expected in zip(given, right, strict=True):
            assert_close(part, expected)


def test_norm_and_gate() -> None:
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.rand(96)
    given, right = (module.add_rms_norm(x, residual, weight, 1e-6) for module in (norm_triton, norm_reference))
    for part, expected in zip(given, right, strict=True):
        assert_close(part, expected)
    gate_up = torch.randn(5, 200)
    assert_close(activation_triton.silu_mul(gate_up), activation_reference.silu_mul(gate_up))


@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_cache_writes(has_norm: bool) -> None:
    norm = HeadNorm(torch.rand(32), torch.rand(32), 1e-6) if has_norm else None
    cos_sin, slot_mapping_T = rope_tables(torch.arange(7) * 5, torch.rand(16)), torch.randperm(64)[:7]
    qk, qkv = torch.randn(7, 9, 32), torch.randn(7, 12, 32)
    given, right = (module.rotate_heads(qk, 6, *cos_sin, norm) for module in (rope_triton, rope_reference))
    for part, expected in zip(given, right, strict=True):
        assert_close(part, expected)
    pages, right_pages = (torch.zeros(4, 2, 3, 16, 32) for _ in range(2))
    given_q, right_q = (
        module.rotate_and_store(qkv, 6, *cos_sin, norm, target, slot_mapping_T, UNSCALED)
        for module, target in ((rope_triton, pages), (rope_reference, right_pages))
    )
    assert_close(given_q, right_q)
    assert_close(pages, right_pages)
    for module, target in ((cache_triton, pages), (cache_reference, right_pages)):
        module.store(qkv[:, 3:6], qkv[:, :3], target, slot_mapping_T, UNSCALED)
    assert_close(pages, right_pages)


@pytest.mark.usefixtures("loops_over_loaded_bounds")
def test_prefill_rows_see_their_own_pages() -> None:
    pages, table = torch.randn(12, 2, 2, 16, 32), torch.randperm(12).int()[:9].view(3, 3)
    rows = PagedPrefill(torch.tensor([0, 5, 5, 25]).int(), torch.tensor([9, 1, 40]).int(), table)
    q, given, right = torch.randn(25, 8, 32), torch.zeros(25, 8, 32), torch.zeros(25, 8, 32)
    prefill_triton.prefill_paged(q, pages, rows, 0.2, given, UNSCALED)
    attention_reference.prefill_paged(q, pages, rows, 0.2, right, UNSCALED)
    assert_close(given, right)


def test_the_argmax_is_the_first_of_the_largest() -> None:
    logits = torch.randn(6, 9000).bfloat16().float()
    assert torch.equal(sampling_triton.sample_greedy(logits), sampling_reference.sample_greedy(logits))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [0, 5000, 8999])
def test_the_argmax_of_a_row_with_nan_or_infinity_is_no_token(value: float, token: int) -> None:
    logits = torch.randn(3, 9000)
    logits[1, token] = value
    first, none, last = sampling_triton.sample_greedy(logits).tolist()
    assert none == sampling_reference.NO_TOKEN
    assert [first, last] == logits[::2].argmax(dim=1).tolist()


@pytest.mark.parametrize("width", [24, 2048])
def test_experts_elsewhere_add_nothing_to_one_or_two_tokens(width: int) -> None:
    """Their ids are -1, and their weights any value."""
    gate_up, down = torch.randn(3, 2 * width, 16) / 4, torch.randn(3, 16, width) / 4
    x, weights = torch.randn(2, 16), torch.tensor([[0.3, float("nan")], [0.5, 0.2]])
    experts = torch.tensor([[2, -1], [0, 1]])
    given = indexed_gemv_triton.expert_mlps(x, gate_up, down, weights, experts, is_partial=True)
    alone = torch.tensor([[0.3, 0.0], [0.5, 0.2]]), torch.tensor([[2, 0], [0, 1]])
    torch.testing.assert_close(given, moe_reference.expert_mlps(x, gate_up, down, *alone), atol=1e-4, rtol=1e-4)


def test_outputs_of_pairs_are_the_reference_s_where_others_are_elsewhere() -> None:
    gate_up, down = torch.randn(3, 48, 16) / 4, torch.randn(3, 16, 24) / 4
    x, experts = torch.randn(9, 16), torch.randint(-1, 3, (9, 1))
    is_here = experts.flatten() >= 0
    expected = moe_reference.expert_parts(x, gate_up, down, experts)[is_here]
    listed = grouped_gemm_triton.expert_parts(x, gate_up, down, experts, 3.0)
    torch.testing.assert_close(listed[is_here], expected, atol=1e-4, rtol=1e-4)


def test_of_sorted_pairs_only_those_of_experts_here_are_computed() -> None:
    x, gate_up = torch.randn(5, 40), torch.randn(10, 2 * 24)
    order, num_here = torch.randperm(10), torch.tensor([7])
    taken = first_rows_triton.take_first_rows(x, order, 2, num_here)
    assert torch.equal(taken[:7], x[order[:7] // 2])
    gated = first_rows_triton.silu_mul_first_rows(gate_up, num_here)
    torch.testing.assert_close(gated[:7], activation_reference.silu_mul(gate_up[:7]), atol=1e-5, rtol=1e-5)
