"""Every GPU backend agrees with its family's reference, up to the rounding of bfloat16."""

import json

import pytest
import torch
from plait_kernels.activation import reference as activation_reference
from plait_kernels.activation import silu_mul
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales, slot_mapping, store
from plait_kernels.kv_cache import reference as cache_reference
from plait_kernels.linear import (
    RowNorm,
    Tile,
    gate_up_silu,
    gemv,
    rmsnorm_gate_up_silu,
    rmsnorm_gemv,
    rmsnorm_router_gemv,
    router_gemm,
    router_gemv,
    skinny_gemm,
    tiles_of,
    tuning_file,
)
from plait_kernels.linear import reference as linear_reference
from plait_kernels.moe import expert_mlps
from plait_kernels.moe import reference as moe_reference
from plait_kernels.norm import add_rms_norm
from plait_kernels.norm import reference as norm_reference
from plait_kernels.rope import HeadNorm, rope_tables, rotate_and_store, rotate_heads
from plait_kernels.rope import reference as rope_reference
from plait_kernels.sampling import NO_TOKEN, Filters, sample_filtered, sample_greedy, sample_random
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu")]
# Each result is rounded once more or once less than the reference's: two steps of bfloat16 in the largest value.
TOLERANCE = 2**-7
MANY = 1024 * 2048  # results, up to which the largest error keeps to that though four roundings add up


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def assert_close(given: Tensor, right: Tensor) -> None:
    error = (given.float() - right.float()).abs().max() / right.float().abs().max()
    assert float(error) <= TOLERANCE


def assert_rounded(given: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Little further from float64 than the plain account in bfloat16 is, all in all and in each row; nowhere far."""
    given_error, plain_error = (each.double() - exact for each in (given, plain))
    of_rows, of_plain = (error.square().mean(dim=1) for error in (given_error, plain_error))
    assert float(of_rows.mean().sqrt()) <= 1.25 * float(of_plain.mean().sqrt())
    assert float((of_rows / of_plain).max().sqrt()) <= 2
    # Roundings add up: of millions of values one lies more than two steps off in the plain account as well.
    tolerance = TOLERANCE if exact.numel() <= MANY else 2 * TOLERANCE
    assert float(given_error.abs().max()) <= tolerance * float(exact.abs().max())


@pytest.mark.parametrize("width", [384, 576, 4096, 5120])
@pytest.mark.parametrize("num_rows", [1, 3, 513])
def test_add_rms_norm(num_rows: int, width: int) -> None:
    x, residual, weight = normal(num_rows, width), normal(num_rows, width), normal(width)
    given = add_rms_norm(x, residual, weight, 1e-6)
    right = norm_reference.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(given[0], right[0])
    assert torch.equal(given[1], right[1])


@pytest.mark.parametrize("width", [192, 1536, 12288])
@pytest.mark.parametrize("num_rows", [1, 300])
def test_silu_mul(num_rows: int, width: int) -> None:
    x = normal(num_rows, 2 * width)
    assert_close(silu_mul(x), activation_reference.silu_mul(x))


@pytest.mark.parametrize("head_dim", [64, 100, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (8, 2), (9, 3), (1, 1)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_heads(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool) -> None:
    qk = normal(130, num_heads + 2 * num_kv_heads, head_dim)[:, : num_heads + num_kv_heads]
    frequencies = 1e4 ** (-torch.arange(head_dim // 2, device="cuda") / (head_dim // 2))
    tables = rope_tables(torch.arange(130, device="cuda") * 63, frequencies)
    norm = HeadNorm(normal(head_dim), normal(head_dim), 1e-6) if has_norm else None
    given = rotate_heads(qk, num_heads, *tables, norm)
    right = rope_reference.rotate_heads(qk, num_heads, *tables, norm)
    for one, other in zip(given, right, strict=True):
        assert one.is_contiguous()
        assert_close(one, other)


def test_keys_and_values_reach_their_slots_beyond_two_to_the_31_elements() -> None:
    num_pages, kv_heads, page_size, head_dim = 20_000, 8, 64, 128
    pages = torch.zeros(num_pages, 2, kv_heads, page_size, head_dim, dtype=torch.bfloat16, device="cuda")
    kv = normal(200, 4 * kv_heads, head_dim)
    k, v = kv[:, kv_heads : 2 * kv_heads], kv[:, 2 * kv_heads : 3 * kv_heads]
    slot_mapping_T = num_pages * page_size - 1 - torch.randperm(4000, device="cuda")[:200]
    store(k, v, pages, slot_mapping_T)
    given = pages.clone()
    pages.zero_()
    cache_reference.store(k, v, pages, slot_mapping_T, UNSCALED)
    assert torch.equal(given, pages)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 151_936), (256, 151_936), (7, 264), (3, 4097)])
def test_sample_greedy_takes_the_lowest_of_equal_logits(num_rows: int, vocab: int) -> None:
    logits = torch.randn(num_rows, vocab, device="cuda").bfloat16().float()  # so coarse that the largest values repeat
    first = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
    assert torch.equal(sample_greedy(logits), first)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_gives_no_token(value: float) -> None:
    logits = torch.randn(3, 151_936, device="cuda").bfloat16()
    logits[1, 70_000] = value
    ones, half = torch.ones(3, device="cuda"), torch.full((3,), 0.5, device="cuda", dtype=torch.float64)
    filters = Filters(torch.full((3,), 40, device="cuda"), 0.9 * ones, 0 * ones)
    sampled = [sample_greedy(logits), sample_random(logits, ones, 0 * ones, half)]
    for ids in [*sampled, sample_filtered(logits, ones, filters, half)]:
        assert (ids == NO_TOKEN).tolist() == [False, True, False]


@pytest.mark.parametrize("num_tokens", [1, 7, 128, 1024, 8192])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "width"),
    [(8, 2, 384, 192), (64, 6, 2048, 1408), (128, 8, 2048, 768), (257, 9, 1024, 512)],
)
@pytest.mark.parametrize("routing", ["spread", "the same experts", "every other expert empty"])
def test_expert_mlps(num_tokens: int, num_experts: int, top_k: int, hidden: int, width: int, routing: str) -> None:
    x = normal(num_tokens, hidden)
    gate_up, down = normal(num_experts, 2 * width, hidden) * 0.03, normal(num_experts, hidden, width) * 0.03
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    if routing == "the same experts":
        logits += 9 * torch.arange(num_experts, device="cuda")
    elif routing == "every other expert empty":
        logits[:, 1::2] -= 99
    weights, experts = moe_reference.softmax_top_k(logits, top_k, True)
    given = expert_mlps(x, gate_up, down, weights, experts)
    exact = moe_reference.expert_mlps(x.double(), gate_up.double(), down.double(), weights, experts)
    assert_rounded(given, moe_reference.expert_mlps(x, gate_up, down, weights, experts), exact)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 12_288), (264, 384), (151_937, 1030)])
def test_gemv(num_outputs: int, num_inputs: int) -> None:
    x, weight = normal(1, num_inputs), normal(num_outputs, num_inputs)
    right = x.double() @ weight.double().T
    assert gemv(x, weight).shape == (1, num_outputs)
    assert_close(gemv(x, weight), right)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 12_288), (264, 384), (151_937, 1030)])
def test_rmsnorm_gemv(num_outputs: int, num_inputs: int) -> None:
    x, weight = normal(1, num_inputs), normal(num_outputs, num_inputs)
    norm = RowNorm(normal(1, num_inputs), normal(num_inputs), 1e-6)
    given, total = rmsnorm_gemv(x, norm, weight)
    right, right_total = linear_reference.rmsnorm_gemv(x, norm, weight)
    assert torch.equal(total, right_total)
    assert_close(given, right)


@pytest.mark.parametrize(("num_experts", "num_inputs"), [(64, 2048), (256, 7168), (3, 1030)])
def test_rmsnorm_router_gemv(num_experts: int, num_inputs: int) -> None:
    x, weight = normal(1, num_inputs), normal(num_experts, num_inputs) / num_inputs**0.5
    norm = RowNorm(normal(1, num_inputs), normal(num_inputs), 1e-6)
    logits, normed, total = rmsnorm_router_gemv(x, norm, weight)
    right_normed, right_total = norm_reference.add_rms_norm(x, *norm)
    assert torch.equal(total, right_total)
    assert_close(normed, right_normed)
    right = normed.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(router_gemv(normed, weight).double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [2, 7, 16, 33, 64])
@pytest.mark.parametrize(("num_experts", "num_inputs"), [(64, 2048), (256, 2048), (3, 1032)])
def test_a_router_multiplies_a_few_rows(num_experts: int, num_inputs: int, num_rows: int) -> None:
    x, weight = normal(num_rows, num_inputs), normal(num_experts, num_inputs) / num_inputs**0.5
    logits, right = router_gemm(x, weight), x.double() @ weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), right, atol=1e-5, rtol=1e-5)
    x[-1, 5] = torch.nan
    of_nan = router_gemm(x, weight)
    assert of_nan[-1].isnan().all()
    assert torch.equal(of_nan[:-1], logits[:-1])


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 150, 8192])
def test_the_slot_mapping_follows_the_rows_page_tables(num_tokens: int, has_rows: bool) -> None:
    table = torch.randint(2**26, (num_tokens, 12), dtype=torch.int32, device="cuda")[:, :8]
    positions = torch.randint(8 * 64, (num_tokens,), device="cuda")
    row = torch.randint(num_tokens, (num_tokens,), device="cuda") if has_rows else None
    right = cache_reference.slot_mapping(table, row, positions, 64)  # beyond 2**31 where a page is far
    assert torch.equal(slot_mapping(table, row, positions, 64), right)


@pytest.mark.parametrize("num", [16, 32, 50, 64])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_rope_tables_of_far_positions_are_those_of_torch(num: int, is_scaled: bool) -> None:
    positions = torch.tensor([0, 1, 4095, 163_839] * 500, device="cuda")
    frequencies = 1e4 ** (-torch.arange(num, device="cuda") / num)
    scale = torch.rand(num, device="cuda") if is_scaled else 1.0
    right = rope_reference.rope_tables(positions, frequencies, scale)
    for part, expected in zip(rope_tables(positions, frequencies, scale), right, strict=True):
        torch.testing.assert_close(part, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("width", "num_inputs"), [(12_288, 4096), (192, 384), (33, 1030)])
def test_rmsnorm_gate_up_silu(width: int, num_inputs: int) -> None:
    x, gate_up = normal(1, num_inputs), normal(2 * width, num_inputs) * 0.03
    norm = RowNorm(normal(1, num_inputs), normal(num_inputs), 1e-6)
    gate, projected = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    assert_close(gate_up_silu(x, gate_up), gate * torch.sigmoid(gate) * projected)
    given, total = rmsnorm_gate_up_silu(x, norm, gate_up)
    _, right_total = linear_reference.rmsnorm_gate_up_silu(x, norm, gate_up)
    assert torch.equal(total, right_total)
    # The reference rounds the norm, both matmuls and the gate: it lies up to 0.011 from float64, the kernel 0.003.
    assert_close(given, exact_gate(total.double(), norm, gate_up.double()))


def exact_gate(total: Tensor, norm: RowNorm, gate_up: Tensor) -> Tensor:
    """In float64."""
    normed = total * torch.rsqrt(total.square().mean() + norm.eps) * norm.weight_I.double()
    gate, up = (normed @ gate_up.T).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("num_rows", [2, 16, 17, 32, 64])
def test_splits_of_a_skinny_gemm_are_added_in_one_order(num_rows: int, splits: int) -> None:
    x, weight, tile = normal(num_rows, 4096), normal(6144, 4096), Tile(64, 128, splits, 4, 4)
    given = skinny_gemm(x, weight, tile)
    assert_close(given, x.double() @ weight.double().T)
    assert all(torch.equal(skinny_gemm(x, weight, tile), given) for _ in range(20))


TUNED = json.loads(tuning_file("NVIDIA H200").read_text())


@pytest.mark.parametrize("shape", [key for key in TUNED if key[0].isdigit()])
def test_every_gemm_of_the_tuning_table_is_right(shape: str) -> None:
    num_outputs, num_inputs = map(int, shape.split("x"))
    weight = normal(num_outputs, num_inputs)
    for num_rows, tile in tiles_of(weight).items():
        x = normal(num_rows, num_inputs)
        assert_close(skinny_gemm(x, weight, tile), x.float() @ weight.float().T)


@pytest.mark.parametrize("head_dim", [64, 100, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (8, 2), (9, 3), (1, 1)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_store(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool) -> None:
    num_pages, page_size = 2**31 // (2 * num_kv_heads * 64 * head_dim) + 8, 64
    qkv = normal(130, num_heads + 2 * num_kv_heads, head_dim)
    frequencies = 1e4 ** (-torch.arange(head_dim // 2, device="cuda") / (head_dim // 2))
    tables = rope_tables(torch.arange(130, device="cuda") * 63, frequencies)
    norm = HeadNorm(normal(head_dim), normal(head_dim), 1e-6) if has_norm else None
    slot_mapping_T = num_pages * page_size - 1 - torch.randperm(600, device="cuda")[:130]
    pages = torch.full((num_pages, 2, num_kv_heads, page_size, head_dim), 1000.0, dtype=torch.bfloat16, device="cuda")
    given_q = rotate_and_store(qkv, num_heads, *tables, norm, pages, slot_mapping_T)
    end = pages[-16:].clone()
    assert pages[:-16].eq(1000).all()
    right_end = torch.full_like(end, 1000.0)
    right_mapping_T = slot_mapping_T - (num_pages - 16) * page_size
    right_q = rope_reference.rotate_and_store(qkv, num_heads, *tables, norm, right_end, right_mapping_T, UNSCALED)
    assert_close(given_q, right_q)
    assert torch.equal(end[:, 1], right_end[:, 1])
    is_written = right_end != 1000
    assert torch.equal(end != 1000, is_written)
    assert_close(end[is_written], right_end[is_written])


def test_fp8_pages_get_clamped_values_over_the_scales() -> None:
    scales, slot_mapping_T = PageScales(0.37, 2.3), torch.tensor([7, 130, 64], device="cuda")
    qkv = normal(3, 12, 128) * 200  # some of it beyond what float8 holds
    given, right = (torch.zeros(3, 2, 2, 64, 128, device="cuda").to(FP8) for _ in range(2))
    store(qkv[:, 8:10], qkv[:, 10:], given, slot_mapping_T, scales)
    cache_reference.store(qkv[:, 8:10], qkv[:, 10:], right, slot_mapping_T, scales)
    # A value halfway between two of float8 may be rounded to either: one step of an eighth.
    assert_near(given, right)
    tables = rope_tables(torch.arange(3, device="cuda"), torch.rand(64, device="cuda"))
    rotate_and_store(qkv, 8, *tables, None, given, slot_mapping_T, scales)
    rope_reference.rotate_and_store(qkv, 8, *tables, None, right, slot_mapping_T, scales)
    assert_near(given, right)


def assert_near(given: Tensor, right: Tensor) -> None:
    assert right.float().abs().max() == 448
    difference = (given.float() - right.float()).abs()
    assert (difference <= right.float().abs() / 8 + 1e-3).all()
    assert float((difference > 0).float().mean()) < 0.01
