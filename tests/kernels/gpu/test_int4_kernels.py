"""GEMMs with 4-bit weights on a GPU give what their numbers mean, for every form and shape that layers cut."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="no Triton; pip install triton")

from plait_kernels.linear import Int4Matrix, Int4Weight, Tile, int4_dequantise, int4_gemm
from plait_kernels.linear.gemm_tuning import int4_tiles_of, tuning_file
from plait_kernels.linear.int4 import FLOAT, INTEGER, join, pack_int4
from plait_kernels.linear.int4_matrix import dequantised_matmul, int4_unsupported_reason
from plait_kernels.linear.int4_tiles import CudaTile, SkinnyTile, WgmmaTile, cuda_tiles_in
from plait_kernels.moe import Int4Experts, stack_int4
from plait_kernels.moe.grouped_gemm_triton import Tile as GroupedTile
from plait_kernels.moe.int4_experts import reference_parts
from plait_kernels.moe.int4_grouped_gemm_triton import expert_parts
from plait_kernels.nvrtc import no_compiler_reason
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu-int4")]
TUNED = json.loads(tuning_file("NVIDIA H200").read_text())
TOLERANCE = 2**-7
"""Two steps of bfloat16 in the largest value."""
FORMS = {
    "AWQ": (INTEGER, 128, True),
    "groups of 64": (INTEGER, 64, True),
    "groups of 32": (INTEGER, 32, True),
    "GPTQ": (INTEGER, 128, False),
    "a scale a channel": (INTEGER, -1, True),
    "groups of 256": (INTEGER, 256, False),
    "MXFP4": (FLOAT, 32, False),
}
"""Kind of codes, group size, and whether there are zeros."""
CASES = [(form, (320, 1280)) for form in FORMS] + [
    ("AWQ", (6144, 4096)),
    ("AWQ", (4096, 12_288)),
    ("MXFP4", (1536, 2048)),
    ("GPTQ", (16, 512)),
]
"""Forms and shapes."""


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    reason = int4_unsupported_reason(torch.device("cuda"), torch.bfloat16)
    if reason is not None:
        pytest.skip(f"4-bit weights: {reason}")
    torch.manual_seed(0)


def normal(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def made(shape: tuple[int, int], form: str) -> Int4Weight:
    kind, group_size, has_zero = FORMS[form]
    num_groups = 1 if group_size < 0 else shape[1] // group_size
    code_OI = torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8)
    scale_OG = (torch.rand(shape[0], num_groups, device="cuda") * 0.01 + 0.001).to(torch.float16)
    zero_OG = torch.randint(0, 17, scale_OG.shape, device="cuda") if has_zero else None
    weight = pack_int4(code_OI, scale_OG, zero_OG, kind)
    assert weight is not None
    return weight


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given.double() - right.double()).abs().max() / right.double().abs().max())


def matmul(x_NI: Tensor, weight: Int4Weight) -> Tensor:
    """float64."""
    return x_NI.double() @ weight.dequantised().double().T


@pytest.mark.parametrize(("form", "shape"), CASES)
def test_a_matrix_multiplies_any_number_of_rows(form: str, shape: tuple[int, int]) -> None:
    weight = made(shape, form)
    matrix = Int4Matrix([weight], None)
    for num_rows in (1, 2, 8, 9, 16, 17, 64, 65, 130, 256, 300, 2049):
        x_NI = normal(num_rows, shape[1])
        assert off_by(matrix(x_NI), matmul(x_NI, weight)) < TOLERANCE, f"{num_rows} rows"


@pytest.mark.parametrize("form", FORMS)
def test_de_quantised_weights_are_the_definition_s_rounded_once(form: str) -> None:
    for shape in ((320, 1280), (4096, 4096), (16, 544)):
        if FORMS[form][1] > 32 and shape[1] % FORMS[form][1]:
            continue
        weight = made(shape, form)
        out_OI = normal(*shape)
        int4_dequantise(weight, range(shape[0]), out_OI)
        assert torch.equal(out_OI, weight.dequantised().bfloat16())
        few_OI = normal(shape[0] - shape[0] // 128 * 64, shape[1])
        rows = range(shape[0] - len(few_OI), shape[0])
        assert torch.equal(int4_dequantise(weight, rows, few_OI), out_OI[rows.start :])


@pytest.mark.parametrize("key", [key for key in TUNED if key.startswith(INTEGER)])
def test_every_tile_of_the_tuning_table_is_right(key: str) -> None:
    num_outputs, num_inputs = map(int, key.split()[1].split("x"))
    weight = made((num_outputs, num_inputs), "AWQ")
    for num_rows, tile in int4_tiles_of(weight).items():
        if num_rows in (1, 2, 8, 9, 16, 17, 64, 65, 256):
            x_NI, out_NO = normal(num_rows, num_inputs), normal(num_rows, num_outputs)
            int4_gemm(x_NI, weight, tile, out_NO)
            assert off_by(out_NO, matmul(x_NI, weight)) < TOLERANCE, f"{num_rows} rows"


@pytest.mark.parametrize("key", [key for key in TUNED if key.startswith("cuda int4")])
def test_every_cuda_tile_of_the_tuning_table_is_right(key: str) -> None:
    num_outputs, num_inputs = map(int, key.split()[2].split("x"))
    weight = made((num_outputs, num_inputs), "AWQ")
    for most_rows, numbers in TUNED[key].items():
        for num_rows, tile in list(cuda_tiles_in({most_rows: numbers}).items())[-1:]:
            x_NI, out_NO = normal(num_rows, num_inputs), normal(num_rows, num_outputs)
            int4_gemm(x_NI, weight, tile, out_NO)
            assert off_by(out_NO, matmul(x_NI, weight)) < TOLERANCE, f"{num_rows} rows"


CUDA_TILES = [
    *(SkinnyTile(1, 8, 4, 2), SkinnyTile(2, 4, 2, 2), SkinnyTile(1, 16, 2, 1)),
    *(WgmmaTile(16, 2, 8, 2, 4), WgmmaTile(32, 2, 6, 2, 0), WgmmaTile(64, 3, 7, 1, 8), WgmmaTile(64, 1, 3, 3, 0)),
    *(WgmmaTile(128, 3, 5, 1, 2), WgmmaTile(128, 1, 3, 2, 1), WgmmaTile(256, 2, 3, 1, 0), WgmmaTile(256, 1, 3, 1, 4)),
]


@pytest.mark.skipif(no_compiler_reason() is not None, reason="no NVRTC")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "MXFP4"])
@pytest.mark.parametrize("tile", CUDA_TILES, ids=str)
def test_each_cuda_tile_gives_the_same_sums_each_time(tile: CudaTile, form: str) -> None:
    weight = made((336, 1280), form)
    for num_rows in (1, 5, 8) if isinstance(tile, SkinnyTile) else (3, tile.rows, tile.rows + 1):
        x_NI, wide_N = normal(num_rows, 1280), [normal(num_rows, 345).fill_(7) for _ in range(3)]
        for wide_NO in wide_N:
            int4_gemm(x_NI, weight, tile, wide_NO[:, :336])
        assert torch.equal(wide_N[0], wide_N[1])
        assert torch.equal(wide_N[0], wide_N[2])
        assert (wide_N[0][:, 336:] == 7).all()
        assert off_by(wide_N[0][:, :336], matmul(x_NI, weight)) < TOLERANCE


TILES = [(64, 128, 6, 4), (64, 256, 4, 4), (64, 512, 3, 4), (128, 128, 4, 8), (128, 256, 3, 8), (256, 128, 3, 16)]


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("tile", TILES)
def test_each_tile_gives_the_same_sums_each_time(tile: tuple[int, int, int, int], splits: int) -> None:
    outputs, inputs, stages, warps = tile
    weight = made((1024, 4096), "AWQ")
    for num_rows in (1, 8, 64):
        x_NI, outs = normal(num_rows, 4096), [normal(num_rows, 1024) for _ in range(3)]
        for out_NO in outs:
            int4_gemm(x_NI, weight, Tile(outputs, inputs, splits, stages, warps), out_NO)
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
        assert off_by(outs[0], matmul(x_NI, weight)) < TOLERANCE


def test_shards_odd_widths_and_joined_matrices_multiply() -> None:
    whole = made((384, 1280), "AWQ")
    shards = [whole.rows(range(48, 208)), whole.columns(range(256, 896)), made((48, 2880), "MXFP4")]
    parts = [made((128, 1280), "AWQ"), made((64, 1280), "GPTQ"), made((64, 1280), "groups of 32")]
    for num_rows in (1, 5, 40, 130, 600):
        for shard in shards:
            assert shard is not None
            weight = shard.to(torch.device("cuda"))
            x_NI = normal(num_rows, weight.num_inputs)
            assert off_by(Int4Matrix([weight], None)(x_NI), matmul(x_NI, weight)) < TOLERANCE
        x_NI, bias_O = normal(num_rows, 1280), normal(256)
        given_NO = Int4Matrix(join(parts), bias_O)(x_NI)
        right_NO = torch.cat([matmul(x_NI, part) for part in parts], dim=1) + bias_O.double()
        assert off_by(given_NO, right_NO) < TOLERANCE


def test_inputs_of_another_order_are_gathered() -> None:
    group_I = torch.randperm(1024, device="cuda") // 128
    code_OI = torch.randint(0, 16, (128, 1024), device="cuda", dtype=torch.uint8)
    weight = pack_int4(code_OI, torch.rand(128, 8, device="cuda").half(), None, INTEGER, group_I)
    assert weight is not None
    assert weight.order_I is not None
    for num_rows in (1, 30, 700):
        x_NI = normal(num_rows, 1024)
        assert off_by(Int4Matrix([weight], None)(x_NI), matmul(x_NI, weight)) < TOLERANCE


def test_panels_are_written_side_by_side() -> None:
    weight, x_NI, out_NO = made((20_000, 4096), "AWQ"), normal(70, 4096), normal(70, 20_000)
    assert off_by(dequantised_matmul(x_NI, weight, out_NO), matmul(x_NI, weight)) < TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 40, 200, 700])
def test_a_nan_stays_in_its_row(num_rows: int) -> None:
    weight, x_NI = made((256, 512), "AWQ"), normal(num_rows, 512)
    x_NI[-1, 7] = float("nan")
    given = Int4Matrix([weight], None)(x_NI)
    assert given[-1].isnan().all()
    assert given[:-1].isfinite().all()


def experts_of(form: str, num: int, hidden: int, width: int) -> Int4Experts:
    return stack_int4((made((2 * width, hidden), form), made((hidden, width), form)) for _ in range(num))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40, 300, 1100])
@pytest.mark.parametrize("form", ["AWQ", "groups of 32", "MXFP4"])
def test_experts_are_the_weighted_sum_of_their_mlps(form: str, num_tokens: int) -> None:
    experts = experts_of(form, 8, 384, 256)
    x_TH, weights_TK = normal(num_tokens, 384), torch.rand(num_tokens, 2, device="cuda")
    # The last expert has no token.
    chosen_TK = torch.rand(num_tokens, 7, device="cuda").argsort(dim=1)[:, :2].contiguous()
    parts_NH = reference_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK)
    right_TH = torch.einsum("tkh,tk->th", parts_NH.unflatten(0, (num_tokens, 2)), weights_TK)
    assert off_by(experts(x_TH, weights_TK, chosen_TK), right_TH) < 2**-6
    chosen_TK[0, 0] = -1
    given_NH = experts.parts(x_TH, weights_TK, chosen_TK, 1).parts
    assert off_by(given_NH[1:], parts_NH[1:]) < 2**-6


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_experts_multiply_by_every_tile(rows: int) -> None:
    experts, x_TH = experts_of("AWQ", 4, 256, 128), normal(50, 256)
    chosen_TK = torch.rand(50, 4, device="cuda").argsort(dim=1)[:, :2].contiguous()
    tile = GroupedTile(rows, 128, 128, 8, 3) if rows > 16 else GroupedTile(rows, 64, 256, 4, 4)
    given = expert_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK, 25.0, tile)
    assert off_by(given, reference_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK)) < 2**-6


@pytest.mark.skipif(no_compiler_reason() is not None, reason="no NVRTC")
def test_gemms_that_follow_one_another_leave_nothing() -> None:
    """Each begins while the one before it ends, and both leave sums in the same place."""
    weights = [made((1040, 1280), "AWQ") for _ in range(4)]
    x_NI = [normal(num_rows, 1280) for num_rows in (64, 130, 256, 9)]
    tiles = [
        WgmmaTile(64, 2, 8, 1, 0),
        WgmmaTile(128, 3, 5, 1, 0),
        WgmmaTile(256, 2, 3, 1, 5),
        WgmmaTile(16, 1, 6, 3, 0),
    ]
    outs = [[normal(len(x), 1040) for x in x_NI] for _ in range(20)]
    for out_NO in outs:
        for x, weight, tile, out in zip(x_NI, weights, tiles, out_NO, strict=True):
            int4_gemm(x, weight, tile, out)
    for x, weight, *each in zip(x_NI, weights, *outs, strict=True):
        assert off_by(each[0], matmul(x, weight)) < TOLERANCE
        assert all(torch.equal(each[0], other) for other in each[1:])


def test_a_captured_gemm_replays_over_new_rows() -> None:
    matrix, x_NI = Int4Matrix([made((512, 1024), "AWQ")], None), normal(700, 1024)
    for num_rows in (1, 24, 200, 700):
        given_NI = x_NI[:num_rows].clone()
        matrix(given_NI)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_NO = matrix(given_NI)
        given_NI.copy_(normal(num_rows, 1024))
        graph.replay()
        assert torch.equal(out_NO, matrix(given_NI))
