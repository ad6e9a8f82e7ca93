"""The CUDA kernels of FP8 GEMMs give what their numbers mean on a played GPU, and compile for a real one.

What a GPU's instructions do is written down in ``played_gpu``, by the PTX manual; ``gpu/test_fp8_kernels`` asks a GPU.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from plait_kernels.linear import Fp8Matrix, Fp8Weight, RowNorm, fp8_gate_up_silu, fp8_gemm_cuda
from plait_kernels.linear.fp8 import (
    FP8,
    GROUP,
    ROWS_MULTIPLE,
    Fp8Rows,
    join,
    quantise_blocks,
    quantise_outputs,
    quantise_rows,
)
from plait_kernels.linear.fp8_gemm_cuda import (
    Form,
    defines_of,
    forms_of,
    gemm_launch,
    row_launch,
    tma_launch,
)
from plait_kernels.linear.fp8_tiles import (
    Fp8CudaTile,
    Fp8GemmTile,
    Fp8RowTile,
    Fp8TmaTile,
    Fp8WgmmaTile,
    can_gate,
    cuda_tiles_in,
    cuda_unsupported_reason,
    row_tile_of,
    tiles_of,
    tma_tiles_in,
)
from plait_kernels.linear.gemm_tuning import fp8_tiles_of
from plait_kernels.nvrtc import CudaError, compile_source, no_compiler_reason
from plait_testing.played_gpu import MULTIPROCESSORS, played, run
from torch import Tensor

SOURCES = Path(fp8_gemm_cuda.__file__).parent
TOLERANCE = 2**-8
"""A step of bfloat16 in the largest value."""
KINDS: dict[str, Callable[[Tensor], Fp8Weight]] = {"outputs": quantise_outputs, "blocks": quantise_blocks}


@pytest.fixture(scope="module", autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, whose includes find the played instructions."""
    folder = tmp_path_factory.mktemp("fp8")
    for source in (*SOURCES.glob("fp8_*.cu"), SOURCES / "wgmma_sums.cuh"):
        shutil.copy(source, folder)
    return folder


def multiplied(
    folder: Path, rows: Fp8Rows, weight: Fp8Weight, tile: Fp8GemmTile, out_NO: Tensor, *, is_gated: bool = False
) -> None:
    form, num_rows = Form(weight.block_rows > 0, is_gated=is_gated), len(out_NO)
    tensors = [rows.stored_NI, rows.scale, weight.stored_OI, weight.scale, out_NO]
    numbers = [num_rows, *weight.shape, rows.scale.stride(1), weight.block_rows, out_NO.stride(0)]
    if isinstance(tile, Fp8TmaTile):
        launch = tma_launch(num_rows, weight.shape, form, tile)
    else:
        launch = gemm_launch(num_rows, weight.shape, form, tile)
    run(played(folder, tile.kernel, defines_of(form, tile)), launch, tensors, numbers)


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given.double() - right).abs().max() / right.abs().max())


def as_kernels_leave(rows: Fp8Rows) -> Fp8Rows:
    """With room for whole fours of rows, of any value."""
    num_rows, num_groups = rows.scale.shape
    scale_GN = torch.full((num_groups, math.ceil(num_rows / ROWS_MULTIPLE) * ROWS_MULTIPLE), torch.nan)
    scale_GN[:, :num_rows] = rows.scale.T
    return Fp8Rows(rows.stored_NI, scale_GN.T[:num_rows])


ROWS_CASES: list[tuple[str, tuple[int, int], Fp8GemmTile, int]] = [
    ("outputs", (80, 656), Fp8WgmmaTile(16, 1, 4, 1, 2), 9),
    ("outputs", (208, 272), Fp8WgmmaTile(64, 3, 3, 1, 1), 70),
    ("blocks", (272, 400), Fp8WgmmaTile(8, 1, 3, 1, 3), 7),
    ("blocks", (144, 640), Fp8WgmmaTile(32, 2, 4, 1, 2), 33),
    ("blocks", (48, 272), Fp8WgmmaTile(128, 1, 3, 1, 1), 130),
    ("outputs", (208, 656), Fp8TmaTile(128, 1, 2, 2), 130),
    ("outputs", (272, 1168), Fp8TmaTile(128, 2, 3, 3), 97),
    ("outputs", (80, 400), Fp8TmaTile(256, 1, 2, 2), 260),
    ("outputs", (64, 128), Fp8TmaTile(64, 1, 2, 4), 3),
    ("blocks", (208, 656), Fp8TmaTile(128, 1, 2, 2), 130),
    ("blocks", (272, 1168), Fp8TmaTile(128, 2, 3, 3), 97),
    ("blocks", (144, 400), Fp8TmaTile(64, 2, 2, 1), 67),
]


@pytest.mark.parametrize(("kind", "shape", "tile", "num_rows"), ROWS_CASES)
def test_rows_are_multiplied(folder: Path, kind: str, shape: tuple[int, int], tile: Fp8GemmTile, num_rows: int) -> None:
    weight = KINDS[kind](torch.randn(shape))
    rows = as_kernels_leave(quantise_rows(torch.randn(num_rows, shape[1]), is_grouped=weight.block_rows > 0))
    wide_NO = torch.full((num_rows, shape[0] + 9), 7.0).bfloat16()
    multiplied(folder, rows, weight, tile, wide_NO[:, : shape[0]])
    right_NO = rows.dequantised().double() @ weight.dequantised().double().T
    assert off_by(wide_NO[:, : shape[0]], right_NO) < TOLERANCE
    assert (wide_NO[:, shape[0] :] == 7).all()


@pytest.mark.parametrize(
    ("block_rows", "tile", "num_rows"), [(16, Fp8TmaTile(64, 2, 2, 1), 70), (1, Fp8TmaTile(128, 1, 3, 4), 33)]
)
def test_blocks_of_few_outputs_have_scales_of_their_own_over_many_inputs(
    folder: Path, block_rows: int, tile: Fp8TmaTile, num_rows: int
) -> None:
    shape = 208, 1808
    scale_BG = torch.rand(shape[0] // block_rows, math.ceil(shape[1] / GROUP)) + 0.1
    weight = Fp8Weight(torch.randn(shape).to(FP8), scale_BG, block_rows)
    rows = as_kernels_leave(quantise_rows(torch.randn(num_rows, shape[1]), is_grouped=True))
    out_NO = torch.empty(num_rows, shape[0], dtype=torch.bfloat16)
    multiplied(folder, rows, weight, tile, out_NO)
    assert off_by(out_NO, rows.dequantised().double() @ weight.dequantised().double().T) < TOLERANCE


GATED_CASES: list[tuple[str, tuple[int, int], Fp8WgmmaTile, int]] = [
    ("outputs", (160, 272), Fp8WgmmaTile(16, 1, 4, 1, 1), 9),
    ("outputs", (432, 656), Fp8WgmmaTile(64, 3, 3, 1, 2), 70),
    ("outputs", (16, 272), Fp8WgmmaTile(8, 2, 3, 1, 1), 8),
    ("blocks", (272, 400), Fp8WgmmaTile(8, 1, 3, 1, 3), 7),
    ("blocks", (336, 640), Fp8WgmmaTile(32, 2, 4, 1, 2), 33),
]


@pytest.mark.parametrize(("kind", "shape", "tile", "num_rows"), GATED_CASES)
def test_rows_are_gated_before_they_are_rounded(
    folder: Path, kind: str, shape: tuple[int, int], tile: Fp8WgmmaTile, num_rows: int
) -> None:
    width, num_inputs = shape[0] // 2, shape[1]
    weight = join([KINDS[kind](torch.randn(width, num_inputs) * num_inputs**-0.5) for _ in range(2)])
    assert weight is not None
    rows = quantise_rows(torch.randn(num_rows, num_inputs) * 3, is_grouped=weight.block_rows > 0)
    wide_NO = torch.full((num_rows, width + 9), 7.0).bfloat16()
    multiplied(folder, rows, weight, tile, wide_NO[:, :width], is_gated=True)
    gate_NO, up_NO = (rows.dequantised().double() @ weight.dequantised().double().T).chunk(2, dim=1)
    right_NO = F.silu(gate_NO) * up_NO
    assert ((wide_NO[:, :width] - right_NO).abs() <= right_NO.abs() * 2**-8 + 1e-5).all(), "each to its last bit"
    assert (wide_NO[:, width:] == 7).all()
    again_NO = fp8_gate_up_silu(rows, weight, tile, torch.empty(num_rows, width, dtype=torch.bfloat16))
    assert ((again_NO - right_NO).abs() <= right_NO.abs() * 2**-8 + 1e-5).all(), "the reference"


@pytest.mark.parametrize("splits", [1, 2])
def test_gates_of_any_size_and_of_no_number_stay_in_their_row(folder: Path, splits: int) -> None:
    gate_up_OI, x_NI = torch.zeros(32, 256), torch.zeros(6, 256)
    gate_up_OI[:, 0], x_NI[:, 0] = 1, torch.tensor([200, -200, 0, 30, float("nan"), 1])
    out_NO = torch.empty(6, 16, dtype=torch.bfloat16)
    rows = quantise_rows(x_NI, is_grouped=False)
    multiplied(folder, rows, quantise_outputs(gate_up_OI), Fp8WgmmaTile(8, 1, 4, 1, splits), out_NO, is_gated=True)
    assert out_NO[4].isnan().all()
    right_N1 = (x_NI.sigmoid() * x_NI.square())[[0, 1, 2, 3, 5], :1]
    torch.testing.assert_close(out_NO[[0, 1, 2, 3, 5]].float(), right_N1.expand(-1, 16), rtol=2**-8, atol=0)


def row_multiplied(
    folder: Path, x_1I: Tensor, norm: RowNorm | None, weight: Fp8Weight, tile: Fp8RowTile, *, is_gated: bool
) -> tuple[Tensor, Tensor]:
    """Outputs, and the row after the residual."""
    form = Form(weight.block_rows > 0, norm is not None, is_gated)
    out_1O, sum_1I = x_1I.new_empty(1, weight.shape[0] // (2 if is_gated else 1)), torch.empty_like(x_1I)
    before = (norm.residual_1I, norm.weight_I) if norm else (x_1I, x_1I)
    tensors = [x_1I, *before, weight.stored_OI, weight.scale, sum_1I, out_1O]
    launch = row_launch(weight.shape, tile, MULTIPROCESSORS)
    library = played(folder, tile.kernel, defines_of(form, tile))
    run(library, launch, tensors, [*weight.shape, weight.block_rows], norm.eps if norm else 0)
    return out_1O, sum_1I


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [Fp8RowTile(2, 4, 2), Fp8RowTile(4, 8, 1)])
def test_a_row_is_not_rounded_with_or_without_a_norm_and_a_gate(folder: Path, kind: str, tile: Fp8RowTile) -> None:
    weight = KINDS[kind](torch.randn(288, 656))
    x_1I, residual_1I, weight_I = (torch.randn(1, 656).bfloat16() for _ in range(3))
    x_1I[0, :140] *= 2.0**100
    residual_1I[0, 300:500] *= 2.0**-100
    norm = RowNorm(residual_1I, weight_I[0], 1e-5)
    value_OI = weight.dequantised().double()
    out_1O, _ = row_multiplied(folder, x_1I, None, weight, tile, is_gated=False)
    assert off_by(out_1O, x_1I.double() @ value_OI.T) < TOLERANCE
    x_1I[0, :140] *= 2.0**-95
    total_1I = x_1I + residual_1I
    normed_1I = F.rms_norm(total_1I.double(), norm.weight_I.shape, norm.weight_I.double(), norm.eps)
    right_1O = normed_1I @ value_OI.T
    out_1O, sum_1I = row_multiplied(folder, x_1I, norm, weight, tile, is_gated=False)
    assert off_by(out_1O, right_1O) < TOLERANCE
    assert torch.equal(sum_1I, total_1I)
    gate_1O, up_1O = right_1O.chunk(2, dim=1)
    out_1O, _ = row_multiplied(folder, x_1I, norm, weight, tile, is_gated=True)
    assert off_by(out_1O, F.silu(gate_1O) * up_1O) < TOLERANCE


def test_a_nan_stays_in_its_row(folder: Path) -> None:
    weight, x_NI = quantise_outputs(torch.randn(64, 256)), torch.randn(7, 256)
    x_NI[3, 9] = float("nan")
    out_NO = torch.empty(7, 64, dtype=torch.bfloat16)
    multiplied(folder, quantise_rows(x_NI, is_grouped=False), weight, Fp8WgmmaTile(8, 1, 4, 1, 1), out_NO)
    assert out_NO[3].isnan().all()
    assert out_NO[torch.arange(7) != 3].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_gives_none(folder: Path, value: float) -> None:
    weight, x_1I = quantise_outputs(torch.randn(32, 256)), torch.randn(1, 256).bfloat16()
    x_1I[0, 200] = value
    out_1O, _ = row_multiplied(folder, x_1I, None, weight, Fp8RowTile(1, 4, 2), is_gated=False)
    assert not out_1O.isfinite().any()


@pytest.mark.skipif(no_compiler_reason() is not None, reason="no NVRTC; pip install cuda-bindings nvidia-cuda-nvrtc")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tile",
    [
        Fp8RowTile(2, 16, 2),
        *(Fp8WgmmaTile(rows, 2, 4, 1, 1) for rows in (8, 16, 32, 64, 128)),
        *(Fp8TmaTile(rows, 2, 4, 3) for rows in (64, 128, 256)),
    ],
)
def test_kernels_compile_for_hopper_gpus(kind: str, tile: Fp8CudaTile) -> None:
    headers, name, weight = sorted(SOURCES.glob("*.cuh")), f"{tile.kernel}.cu", KINDS[kind](torch.randn(64, 256))
    gated = [Form(weight.block_rows > 0, is_gated=True)] if isinstance(tile, Fp8WgmmaTile) else []
    is_refused = isinstance(tile, Fp8TmaTile) and weight.block_rows and tile.rows == 256
    with pytest.raises(CudaError, match="no registers") if is_refused else nullcontext():
        for form in (*forms_of(weight, tile), *gated):
            assert compile_source((SOURCES / name).read_bytes(), name, defines_of(form, tile), (9, 0), headers)


def test_a_matrix_is_compiled_for_all_that_its_rows_may_need() -> None:
    weight, odd = quantise_outputs(torch.randn(64, 256)), quantise_blocks(torch.randn(48, 256))
    every = [Form(False, norm, gate) for norm in (False, True) for gate in (False, True)]
    assert forms_of(weight, Fp8RowTile(2, 4, 2)) == every
    assert forms_of(weight, Fp8WgmmaTile(8, 2, 4, 1, 1)) == [Form(False)]
    assert forms_of(odd, Fp8RowTile(2, 4, 2)) == [Form(True), Form(True, True)], "24 outputs are no whole tiles"
    assert forms_of(weight, Fp8RowTile(1, 4, 2)) == [Form(False), Form(False, True)]


def test_gates_are_for_whole_eights_and_for_rows_with_a_kernel() -> None:
    tile = Fp8WgmmaTile(8, 1, 4, 1, 1)
    assert [can_gate(quantise_outputs(torch.ones(num, 64)), tile) for num in (16, 24, 48)] == [True, False, True]
    matrix, x_1I = Fp8Matrix(quantise_outputs(torch.randn(96, 64)), None), torch.randn(1, 64)
    matrix.compile_gates()
    assert [rows for rows in range(70) if matrix.gates(rows)] == [1], "elsewhere one row alone"
    gate_1O, up_1O = matrix(x_1I).chunk(2, dim=1)
    torch.testing.assert_close(matrix.gate_up(x_1I), F.silu(gate_1O) * up_1O)


def test_blocks_have_the_work_of_a_matrix() -> None:
    launch = row_launch((6144, 4096), Fp8RowTile(2, 16, 2), 132)
    assert (launch.blocks, launch.threads) == (132, 512), "one for each multiprocessor"
    assert row_launch((2048, 2048), Fp8RowTile(2, 16, 2), 132).blocks == 64
    assert gemm_launch(70, (6144, 4096), Form(False), Fp8WgmmaTile(64, 2, 4, 2, 4))[::3] == (2 * 48 * 4, 4)
    assert gemm_launch(8, (64, 256), Form(True), Fp8WgmmaTile(8, 1, 4, 1, 8)).cluster == 2, "chunks of inputs"
    assert tma_launch(200, (4096, 12288), Form(False), Fp8TmaTile(128, 2, 7, 3))[::3] == (2 * 32 * 3, 3)


def test_no_block_has_more_inputs_than_its_sums_are_exact_for() -> None:
    with pytest.raises(ValueError, match="splits 12288 inputs into more than 4096 each"):
        tma_launch(200, (4096, 12288), Form(False), Fp8TmaTile(128, 2, 7, 2))


def test_tiles_of_the_table_serve_up_to_their_rows() -> None:
    tiles = cuda_tiles_in({"1": [2, 16, 2], "64": [64, 2, 4, 2, 4]})
    expected: dict[int, Fp8CudaTile] = {1: Fp8RowTile(2, 16, 2)}
    assert tiles == expected | dict.fromkeys(range(33, 65), Fp8WgmmaTile(64, 2, 4, 2, 4))
    assert tma_tiles_in({"64": [64, 2, 9, 3], "256": [256, 2, 4, 3]}) == (
        dict.fromkeys(range(33, 65), Fp8TmaTile(64, 2, 9, 3)) | dict.fromkeys(range(129, 257), Fp8TmaTile(256, 2, 4, 3))
    )


def test_triton_multiplies_elsewhere_and_it_is_said_why() -> None:
    weight = quantise_outputs(torch.randn(6144, 64))
    assert cuda_unsupported_reason(weight) == "it is not on a Hopper GPU"
    assert tiles_of(weight) == fp8_tiles_of(weight)
    assert row_tile_of(weight) is None
