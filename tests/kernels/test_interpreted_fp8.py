"""The FP8 experts' kernels agree with their references in Triton's interpreter.

Their compiled form is tried by tests/kernels/gpu.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU is here, which runs the compiled kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, and Triton's own are when it is imported
pytest.importorskip("triton", reason="no Triton; pip install triton")

import triton.language as tl
from plait_kernels.linear import Fp8Weight, RowNorm, fp8_quantise_triton, fp8_reference
from plait_kernels.linear.fp8 import GROUP, join, quantise_blocks, quantise_outputs, quantise_rows
from plait_kernels.linear.fp8_reference import silu_mul_quantise
from plait_kernels.moe import Fp8Experts, fp8_gated_gemm_triton, fp8_grouped_gemm_triton, stack_fp8
from plait_kernels.moe.fp8_experts import reference_parts
from plait_kernels.moe.grouped_gemm_triton import Tile, list_pairs
from triton.runtime import interpreter

KINDS: dict[str, Callable[[Tensor], Fp8Weight]] = {"outputs": quantise_outputs, "blocks": quantise_blocks}
NUM_EXPERTS, TOP_K = 4, 2
SHAPES = [(256, 128), (384, 192), (208, 352)]
"""Hidden sizes and widths: whole groups, and ranks' shards."""


TORCH_TYPES = {
    **{tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16},
    **{tl.float16: torch.float16, tl.float32: torch.float32},
}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def rounds_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 does not carry a mantissa that it rounds up, and makes numbers of FP8's NaNs."""

    def convert(data: Any, given: object, wanted: object, _rounding: object) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(data))
        return bits.view(TORCH_TYPES[given]).to(TORCH_TYPES[wanted]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given.double() - right.double()).abs().max() / right.double().abs().max())


def experts_of(kind: str, hidden: int, width: int) -> Fp8Experts:
    """Gate and up are joined as a layer's are: blocks that the width cuts become smaller ones."""

    def one() -> tuple[Fp8Weight, Fp8Weight]:
        gate_up = join([KINDS[kind](torch.randn(width, hidden) / hidden**0.5) for _ in range(2)])
        assert gate_up is not None
        return gate_up, KINDS[kind](torch.randn(hidden, width) / width**0.5)

    return stack_fp8(one() for _ in range(NUM_EXPERTS))


def chosen_by(num_tokens: int) -> Tensor:
    """The last expert has no token, one pair is elsewhere, and one list is longer than a tile."""
    chosen_TK = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:TOP_K] for _ in range(num_tokens)])
    chosen_TK[0, 1] = -1
    return chosen_TK


@pytest.mark.parametrize(("hidden", "width"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [3, 29])
def test_experts_of_few_rows_gate_and_quantise_in_their_first_gemm(
    num_tokens: int, kind: str, hidden: int, width: int
) -> None:
    experts, chosen_TK = experts_of(kind, hidden, width), chosen_by(num_tokens)
    gate_up, down, is_here_N = experts.gate_up_EJH, experts.down_EHI, chosen_TK.flatten() >= 0
    x_TH, pair_N = torch.randn(num_tokens, hidden), torch.arange(chosen_TK.numel())
    rows, lists = quantise_rows(x_TH, is_grouped=kind == "blocks"), (*list_pairs(chosen_TK, NUM_EXPERTS), num_tokens)
    gated = fp8_gated_gemm_triton.gated_rows(rows, gate_up, lists, TOP_K)
    assert gated.scale.shape == (num_tokens * TOP_K, -(-width // GROUP))
    right = silu_mul_quantise(multiplied(rows.dequantised()[pair_N // TOP_K], gate_up, chosen_TK), is_grouped=True)
    assert off_by(gated.scale[is_here_N], right.scale[is_here_N]) < 1e-5
    assert off_by(gated.dequantised()[is_here_N], right.dequantised()[is_here_N]) < 2**-3
    parts_NH = torch.empty(num_tokens * TOP_K, hidden)
    fp8_gated_gemm_triton.down_parts(right, down, lists, parts_NH)
    right_NH = multiplied(right.dequantised(), down, chosen_TK)
    assert off_by(parts_NH[is_here_N], right_NH[is_here_N]) < 1e-5


def multiplied(rows_NI: Tensor, weight: Fp8Weight, chosen_TK: Tensor) -> Tensor:
    """Each pair's row, by its expert's matrix; those of experts elsewhere have any value."""
    matrices = [weight.one(expert).dequantised() for expert in range(NUM_EXPERTS)]
    return torch.stack([matrices[expert] @ row_I for row_I, expert in zip(rows_NI, chosen_TK.flatten(), strict=True)])


@pytest.mark.parametrize("lengths", [[17, 17, 17, 1], [0, 0, 0, 40], [1, 1, 0, 1], [16, 0, 33, 2], [1, 0, 0, 0]])
def test_every_tile_of_lists_of_any_lengths_has_its_program(lengths: list[int]) -> None:
    chosen_TK = torch.repeat_interleave(torch.arange(NUM_EXPERTS), torch.tensor(lengths))[:, None]
    chosen_TK = chosen_TK[torch.randperm(len(chosen_TK))]
    rows = quantise_rows(torch.randn(len(chosen_TK), 128), is_grouped=False)
    lists, down = (*list_pairs(chosen_TK, NUM_EXPERTS), len(chosen_TK)), experts_of("outputs", 128, 128).down_EHI
    parts_NH = torch.full((len(chosen_TK), 128), torch.nan)
    fp8_gated_gemm_triton.down_parts(rows, down, lists, parts_NH)
    assert off_by(parts_NH, multiplied(rows.dequantised(), down, chosen_TK)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_pairs_per_expert", [3.0, 12.1])
def test_experts_of_few_and_of_many_rows_are_the_reference_s(kind: str, num_pairs_per_expert: float) -> None:
    experts, chosen_TK, x_TH = experts_of(kind, 384, 192), chosen_by(29), torch.randn(29, 384)
    given = experts.gate_up_EJH, experts.down_EHI, chosen_TK, num_pairs_per_expert
    is_here_N, right_NH = chosen_TK.flatten() >= 0, reference_parts(x_TH, *given)
    given_NH = fp8_grouped_gemm_triton.expert_parts(x_TH, *given)
    assert off_by(given_NH[is_here_N], right_NH[is_here_N]) < 2**-5


def test_a_nan_stays_in_the_rows_of_its_token() -> None:
    experts, chosen_TK, x_TH = experts_of("outputs", 256, 192), chosen_by(9), torch.randn(9, 256)
    x_TH[4, 7] = float("nan")
    given_TKH = fp8_grouped_gemm_triton.expert_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK, 3.0)
    given_TKH = given_TKH.unflatten(0, chosen_TK.shape)
    assert given_TKH[4].isnan().all()
    given_TKH[0, 1] = given_TKH[4] = 0
    assert given_TKH.isfinite().all()


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("width", [256, 352])
def test_a_norm_is_kept_and_quantised_as_it_is_kept(width: int, is_grouped: bool) -> None:
    norm = RowNorm(torch.randn(5, width).bfloat16(), torch.rand(width).bfloat16(), 1e-6)
    x_NI = torch.randn(5, width).bfloat16()
    x_NI[2], norm.residual_1I[2] = 0, 0
    x_NI[3, 7] = torch.nan
    normed_NI, rows, sum_NI = fp8_quantise_triton.add_rms_norm_quantise(x_NI, norm, is_grouped=is_grouped)
    right_NI, _, right_sum_NI = fp8_reference.add_rms_norm_quantise(x_NI, norm, is_grouped=is_grouped)
    torch.testing.assert_close(sum_NI, right_sum_NI, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normed_NI, right_NI, rtol=2**-7, atol=0, equal_nan=True)
    assert rows.dequantised()[3].isnan().any()
    others, right = [0, 1, 2, 4], quantise_rows(normed_NI, is_grouped=is_grouped)
    assert off_by(rows.dequantised()[others], right.dequantised()[others]) < 1e-6


@pytest.mark.parametrize("rows", [32, 64])
def test_a_tile_of_more_rows_is_as_right(rows: int) -> None:
    experts, chosen_TK, x_TH = experts_of("outputs", 256, 192), chosen_by(70), torch.randn(70, 256)
    lists, is_here_N = (*list_pairs(chosen_TK, NUM_EXPERTS), 70), chosen_TK.flatten() >= 0
    quantised, tile = quantise_rows(x_TH, is_grouped=False), Tile(rows, GROUP, GROUP, 4, 3)
    given, right = (
        fp8_gated_gemm_triton.gated_rows(quantised, experts.gate_up_EJH, lists, TOP_K, each)
        for each in (tile, fp8_gated_gemm_triton.GATE_UP)
    )
    assert torch.equal(given.dequantised()[is_here_N], right.dequantised()[is_here_N])
