"""FP8 GEMMs, GEMVs and experts on a GPU give what their numbers mean, for every shape that layers cut."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="no Triton; pip install triton")

from plait_kernels.linear import (
    Fp8Matrix,
    Fp8Rows,
    Fp8Weight,
    RowNorm,
    Tile,
    add_rms_norm_quantise,
    fp8_gate_up_silu,
    fp8_gemm,
    fp8_reference,
    gate_up_silu,
    gemv,
    quantise_rows,
    rmsnorm_gate_up_silu,
    rmsnorm_gemv,
    rmsnorm_quantise,
    silu_mul_quantise,
)
from plait_kernels.linear import fp8 as reference
from plait_kernels.linear.fp8 import join, quantise_blocks, quantise_outputs
from plait_kernels.linear.fp8_gemm_cuda import compile_for
from plait_kernels.linear.fp8_matrix import fp8_unsupported_reason
from plait_kernels.linear.fp8_tiles import Fp8RowTile, Fp8WgmmaTile, cuda_tiles_in, tma_tiles_in
from plait_kernels.linear.gemm_tuning import tuning_file
from plait_kernels.moe import Fp8Experts, fp8_gated_gemm_triton, stack_fp8
from plait_kernels.moe.fp8_experts import reference_parts
from plait_kernels.moe.grouped_gemm_triton import list_pairs
from plait_kernels.nvrtc import no_compiler_reason
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu-fp8")]
KINDS: dict[str, Callable[[Tensor], Fp8Weight]] = {"outputs": quantise_outputs, "blocks": quantise_blocks}
TUNED = json.loads(tuning_file("NVIDIA H200").read_text())
needs_nvrtc = pytest.mark.skipif(no_compiler_reason() is not None, reason="no NVRTC")
TOLERANCE = 2**-7
"""Two steps of bfloat16 in the largest value."""
SHAPES = [(384, 1408), (320, 1408), (4096, 4096), (2048, 10_944), (6144, 4096), (16, 16)]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    reason = fp8_unsupported_reason(torch.device("cuda"), torch.bfloat16)
    if reason is not None:
        pytest.skip(f"FP8 weights: {reason}")
    torch.manual_seed(0)


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given.double() - right.double()).abs().max() / right.double().abs().max())


def matmul(x_NI: Tensor, weight: Fp8Weight) -> Tensor:
    """float64."""
    return x_NI.double() @ weight.dequantised().double().T


def is_grouped(weight: Fp8Weight) -> bool:
    return weight.block_rows > 0


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64, 65, 300, 2049])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_multiplies_any_number_of_rows(kind: str, shape: tuple[int, int], num_rows: int) -> None:
    weight, x_NI = KINDS[kind](normal(*shape)), normal(num_rows, shape[1])
    rows_NI = x_NI if num_rows == 1 else quantise_rows(x_NI, is_grouped=is_grouped(weight)).dequantised()
    assert off_by(Fp8Matrix(weight, None)(x_NI), matmul(rows_NI, weight)) < TOLERANCE


@pytest.mark.parametrize("rows", [range(64, 384), range(320), range(48, 208)])
def test_a_shard_of_blocks_cut_between_outputs_multiplies(rows: range) -> None:
    weight = quantise_blocks(normal(384, 1408)).rows(rows).to(torch.device("cuda"))
    matrix = Fp8Matrix(weight, None)
    for num_rows in (1, 5, 130):
        x_NI = normal(num_rows, 1408)
        rows_NI = x_NI if num_rows == 1 else quantise_rows(x_NI, is_grouped=True).dequantised()
        assert off_by(matrix(x_NI), matmul(rows_NI, weight)) < TOLERANCE


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_split_sums_are_the_same_each_time(kind: str, splits: int) -> None:
    weight, x_NI = KINDS[kind](normal(4096, 4096)), normal(33, 4096)
    rows, outs = quantise_rows(x_NI, is_grouped=is_grouped(weight)), [normal(33, 4096) for _ in range(3)]
    for out_NO in outs:
        fp8_gemm(rows, weight, Tile(64, 128, splits, 3, 4), out_NO)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert off_by(outs[0], matmul(rows.dequantised(), weight)) < TOLERANCE


def nearly_same(given: Fp8Rows, right: Fp8Rows) -> None:
    """All but a few, which lie half way between two numbers."""
    assert off_by(given.scale, right.scale) < 1e-6
    assert float((given.stored_NI.float() != right.stored_NI.float()).float().mean()) < 1e-3
    assert off_by(given.dequantised(), right.dequantised()) < 2**-3


@pytest.mark.parametrize("width", [384, 1408, 4096, 10_944])
@pytest.mark.parametrize("grouped", [False, True])
def test_rows_are_quantised_as_the_reference_does(grouped: bool, width: int) -> None:
    x_NI, residual_NI, weight_I = normal(67, width), normal(67, width), normal(width)
    x_NI[3] = 0
    nearly_same(quantise_rows(x_NI, is_grouped=grouped), reference.quantise_rows(x_NI, is_grouped=grouped))
    norm = RowNorm(residual_NI, weight_I, 1e-6)
    given, sum_NI = rmsnorm_quantise(x_NI, norm, is_grouped=grouped)
    right, right_sum_NI = fp8_reference.rmsnorm_quantise(x_NI, norm, is_grouped=grouped)
    assert torch.equal(sum_NI, right_sum_NI)
    nearly_same(given, right)
    normed_NI, rows, sum_NI = add_rms_norm_quantise(x_NI, norm, is_grouped=grouped)
    assert torch.equal(sum_NI, right_sum_NI)
    assert off_by(normed_NI, fp8_reference.add_rms_norm_quantise(x_NI, norm, is_grouped=grouped)[0]) < TOLERANCE
    nearly_same(rows, reference.quantise_rows(normed_NI, is_grouped=grouped))
    gated, right = (
        silu(normal_of(x_NI), is_grouped=grouped) for silu in (silu_mul_quantise, fp8_reference.silu_mul_quantise)
    )
    nearly_same(gated, right)


def normal_of(x_NI: Tensor) -> Tensor:
    return torch.cat((x_NI, x_NI.flip(0)), dim=1)


ROW_TILES = [Fp8RowTile(2, 16, 2), Fp8RowTile(4, 8, 1)]


@pytest.mark.parametrize("shape", [(384, 1408), (6144, 4096), (4096, 12_288), (512, 192), (608, 2064)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, *(pytest.param(tile, marks=needs_nvrtc, id=str(tile)) for tile in ROW_TILES)])
def test_one_row_is_not_rounded_with_or_without_a_norm_and_a_gate(
    tile: Fp8RowTile | None, kind: str, shape: tuple[int, int]
) -> None:
    halves, x_1I = [KINDS[kind](normal(shape[0] // 2, shape[1])) for _ in range(2)], normal(1, shape[1])
    weight = join(halves)
    assert weight is not None
    norm = RowNorm(normal(1, shape[1]), normal(shape[1]), 1e-6)
    total_1I = x_1I + norm.residual_1I
    normed_1I = F.rms_norm(total_1I.double(), norm.weight_I.shape, norm.weight_I.double(), norm.eps)
    for scale in (1.0, 2.0**60, 2.0**-60):
        assert off_by(gemv(x_1I * scale, weight, None, tile), matmul(x_1I * scale, weight)) < TOLERANCE
    out_1O, sum_1I = rmsnorm_gemv(x_1I, norm, weight, tile)
    assert torch.equal(sum_1I, total_1I)
    assert off_by(out_1O, matmul(normed_1I, weight)) < TOLERANCE
    assert off_by(gate_up_silu(x_1I, weight, tile), gate(matmul(x_1I, weight))) < TOLERANCE
    out_1O, _ = rmsnorm_gate_up_silu(x_1I, norm, weight, tile)
    assert off_by(out_1O, gate(matmul(normed_1I, weight))) < TOLERANCE


WGMMA_TILES = [
    *(Fp8WgmmaTile(8, 1, 6, 4, 4), Fp8WgmmaTile(16, 3, 8, 1, 1), Fp8WgmmaTile(32, 2, 5, 2, 3)),
    *(Fp8WgmmaTile(64, 3, 6, 1, 1), Fp8WgmmaTile(64, 1, 6, 2, 8), Fp8WgmmaTile(128, 1, 4, 2, 2)),
]


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", WGMMA_TILES, ids=str)
def test_each_cuda_tile_gives_the_same_sums_each_time(tile: Fp8WgmmaTile, kind: str) -> None:
    weight = KINDS[kind](normal(336, 1296))
    for num_rows in (3, tile.rows, tile.rows + 1):
        rows, wide_N = quantise_rows(normal(num_rows, 1296), is_grouped=is_grouped(weight)), list[Tensor]()
        for _ in range(3):
            wide_N.append(normal(num_rows, 345).fill_(7))
            fp8_gemm(rows, weight, tile, wide_N[-1][:, :336])
        assert torch.equal(wide_N[0], wide_N[1])
        assert torch.equal(wide_N[0], wide_N[2])
        assert (wide_N[0][:, 336:] == 7).all()
        assert off_by(wide_N[0][:, :336], matmul(rows.dequantised(), weight)) < TOLERANCE


def gate_up_of(kind: str, width: int, num_inputs: int) -> Fp8Weight:
    weight = join([KINDS[kind](normal(width, num_inputs)) for _ in range(2)])
    assert weight is not None
    return weight


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", WGMMA_TILES, ids=str)
def test_each_cuda_tile_gates_its_rows(tile: Fp8WgmmaTile, kind: str) -> None:
    weight = gate_up_of(kind, 168, 1296)
    for num_rows in (3, tile.rows, tile.rows + 1):
        x_NI = normal(num_rows, 1296)
        x_NI[-1, 7] = float("nan")
        rows, wide_N = quantise_rows(x_NI, is_grouped=is_grouped(weight)), list[Tensor]()
        for _ in range(3):
            wide_N.append(normal(num_rows, 177).fill_(7))
            fp8_gate_up_silu(rows, weight, tile, wide_N[-1][:, :168])
        given_NO, right_NO = wide_N[0][:, :168], gate(matmul(rows.dequantised(), weight))
        assert torch.equal(wide_N[0][:-1], wide_N[1][:-1])
        assert torch.equal(wide_N[0][:-1], wide_N[2][:-1])
        assert (wide_N[0][:, 168:] == 7).all()
        assert given_NO[-1].isnan().all()
        assert off_by(given_NO[:-1], right_NO[:-1]) < TOLERANCE


@needs_nvrtc
@pytest.mark.parametrize("num_rows", [2, 40, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_gates_few_rows_as_its_outputs_are_gated(kind: str, num_rows: int) -> None:
    matrix, x_NI = Fp8Matrix(gate_up_of(kind, 2816, 2048), None), normal(num_rows, 2048)
    norm = RowNorm(normal(num_rows, 2048), normal(2048), 1e-6)
    assert not matrix.gates(num_rows), "before its kernels are compiled"
    matrix.compile_gates()
    assert matrix.gates(num_rows)
    assert not matrix.gates(65)
    assert off_by(matrix.gate_up(x_NI), gate(matrix(x_NI).double())) < TOLERANCE
    given_NO, sum_NI = matrix.rmsnorm_gate_up(x_NI, norm)
    both_NO, right_sum_NI = matrix.rmsnorm_matmul(x_NI, norm)
    assert torch.equal(sum_NI, right_sum_NI)
    assert off_by(given_NO, gate(both_NO.double())) < TOLERANCE


@needs_nvrtc
@pytest.mark.parametrize("key", [key for key in TUNED if key.startswith("cuda fp8")])
def test_every_cuda_tile_of_the_tuning_table_is_right(key: str) -> None:
    num_outputs, num_inputs = map(int, key.rpartition(" ")[2].split("x"))
    weight = KINDS["blocks" if "blocks" in key else "outputs"](normal(num_outputs, num_inputs))
    for most_rows, numbers in TUNED[key].items():
        tile, x_NI = cuda_tiles_in({most_rows: numbers})[int(most_rows)], normal(int(most_rows), num_inputs)
        compile_for(weight, [tile])
        if isinstance(tile, Fp8RowTile):
            assert off_by(gemv(x_NI, weight, None, tile), matmul(x_NI, weight)) < TOLERANCE
            continue
        rows = quantise_rows(x_NI, is_grouped=is_grouped(weight))
        out_NO = fp8_gemm(rows, weight, tile, normal(len(x_NI), num_outputs))
        right_NO = matmul(rows.dequantised(), weight)
        assert off_by(out_NO, right_NO) < TOLERANCE, f"{most_rows} rows"
        gated_NO = fp8_gate_up_silu(rows, weight, tile, normal(len(x_NI), num_outputs // 2))
        assert off_by(gated_NO, gate(right_NO)) < TOLERANCE, f"{most_rows} rows with gates"


@needs_nvrtc
@pytest.mark.parametrize("key", [key for key in TUNED if key.startswith("tma fp8")])
def test_every_tile_copied_by_tma_is_right_for_the_rows_it_serves(key: str) -> None:
    num_outputs, num_inputs = map(int, key.rpartition(" ")[2].split("x"))
    quantise = quantise_blocks if "blocks" in key else quantise_outputs
    weight, tiles = quantise(normal(num_outputs, num_inputs)), tma_tiles_in(TUNED[key])
    compile_for(weight, tiles.values())
    for num_rows in sorted({min(tiles), *(rows for rows in tiles if rows % 64 in (0, 1)), 100, 203} & tiles.keys()):
        rows = quantise_rows(normal(num_rows, num_inputs), is_grouped=is_grouped(weight))
        wide_NO = torch.full((num_rows, num_outputs + 8), 7.0, dtype=torch.bfloat16, device="cuda")
        out_NO = wide_NO[:, :num_outputs]
        first_NO = fp8_gemm(rows, weight, tiles[num_rows], out_NO).clone()
        assert off_by(first_NO, matmul(rows.dequantised(), weight)) < TOLERANCE, f"{num_rows} rows"
        assert (wide_NO[:, num_outputs:] == 7).all()
        for _ in range(20):
            assert torch.equal(fp8_gemm(rows, weight, tiles[num_rows], out_NO), first_NO)


def gate(gate_up: Tensor) -> Tensor:
    gate_N, up_N = gate_up.chunk(2, dim=1)
    return F.silu(gate_N) * up_N


@pytest.mark.parametrize("num_rows", [1, 40, 200])
def test_a_nan_stays_in_its_row(num_rows: int) -> None:
    weight, x_NI = quantise_outputs(normal(256, 512)), normal(num_rows, 512)
    x_NI[-1, 7] = float("nan")
    given = Fp8Matrix(weight, None)(x_NI)
    assert given[-1].isnan().all()
    assert given[:-1].isfinite().all()


def experts_of(kind: str, num: int, hidden: int, width: int) -> Fp8Experts:
    def one() -> tuple[Fp8Weight, Fp8Weight]:
        gate_up = join([KINDS[kind](normal(width, hidden) * 0.1) for _ in range(2)])
        assert gate_up is not None
        return gate_up, KINDS[kind](normal(hidden, width) * 0.1)

    return stack_fp8(one() for _ in range(num))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40, 300, 1100, 2100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [192, 256, 352])
def test_experts_are_the_weighted_sum_of_their_mlps(width: int, kind: str, num_tokens: int) -> None:
    experts = experts_of(kind, 8, 384, width)
    x_TH, weights_TK = normal(num_tokens, 384), torch.rand(num_tokens, 2, device="cuda")
    # The last expert has no token.
    chosen_TK = torch.rand(num_tokens, 7, device="cuda").argsort(dim=1)[:, :2].contiguous()
    parts_NH = reference_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK, num_tokens * 2 / 8)
    right_TH = torch.einsum("tkh,tk->th", parts_NH.unflatten(0, (num_tokens, 2)), weights_TK)
    assert off_by(experts(x_TH, weights_TK, chosen_TK), right_TH) < 2**-4


@pytest.mark.parametrize("num_tokens", [3, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "width"), [(2048, 1408), (2048, 352), (384, 192)])
def test_few_rows_are_gated_and_quantised_in_the_first_gemm(
    hidden: int, width: int, kind: str, num_tokens: int
) -> None:
    """As by float64 of the same rows; an expert of -1 is elsewhere, and one has a list longer than a tile."""
    experts, x_TH = experts_of(kind, 9, hidden, width), normal(num_tokens, hidden)
    chosen_TK = torch.rand(num_tokens, 7, device="cuda").argsort(dim=1)[:, :4].contiguous()
    chosen_TK[:, 3], chosen_TK[0, 1] = 8, -1
    lists = (*list_pairs(chosen_TK, 9), num_tokens)
    rows, parts_NH = quantise_rows(x_TH, is_grouped=kind == "blocks"), normal(num_tokens * 4, hidden)
    gated = fp8_gated_gemm_triton.gated_rows(rows, experts.gate_up_EJH, lists, 4)
    fp8_gated_gemm_triton.down_parts(gated, experts.down_EHI, lists, parts_NH)
    for pair, expert in enumerate(chosen_TK.flatten().tolist()):
        if expert < 0:
            continue
        row_1H = rows.dequantised()[pair // 4 : pair // 4 + 1]
        gated_1I = gate(matmul(row_1H, experts.gate_up_EJH.one(expert)))
        given_1I = gated.dequantised()[pair : pair + 1]
        assert off_by(given_1I, gated_1I) < 2**-4
        assert off_by(parts_NH[pair : pair + 1], matmul(given_1I, experts.down_EHI.one(expert))) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_gemm_replays_over_new_rows(kind: str) -> None:
    matrix, x_NI = Fp8Matrix(KINDS[kind](normal(512, 1024)), None), normal(200, 1024)
    for num_rows in (1, 24, 200):
        given_NI = x_NI[:num_rows].clone()
        matrix(given_NI)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_NO = matrix(given_NI)
        given_NI.copy_(normal(num_rows, 1024))
        graph.replay()
        assert torch.equal(out_NO, matrix(given_NI))
