"""The CUDA kernels of 4-bit GEMMs give what their numbers mean on a played GPU, and compile for a real one.

What a GPU's instructions do is written down in ``played_gpu``, by the PTX manual; ``gpu/test_int4_kernels`` asks a GPU.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plait_kernels.linear import int4_gemm_cuda
from plait_kernels.linear.int4 import FLOAT, Int4Weight, pack_int4
from plait_kernels.linear.int4_gemm_cuda import defines_of, launch_of
from plait_kernels.linear.int4_tiles import Int4Tile, SkinnyTile, WgmmaTile, cuda_tiles_in, cuda_unsupported_reason
from plait_kernels.nvrtc import compile_source, no_compiler_reason
from plait_testing.played_gpu import MULTIPROCESSORS, played, run
from torch import Tensor

SOURCES = Path(int4_gemm_cuda.__file__).parent
TOLERANCE = 2**-8
"""A step of bfloat16 in the largest value."""


@pytest.fixture(scope="module", autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, whose includes find the played instructions."""
    folder = tmp_path_factory.mktemp("int4")
    for name in ("int4_codes.cuh", "wgmma_sums.cuh", "int4_skinny_gemm.cu", "int4_wgmma_gemm.cu"):
        shutil.copy(SOURCES / name, folder)
    return folder


def made(
    shape: tuple[int, int], group_size: int, scale_dtype: torch.dtype = torch.float16, *, has_zero: bool = True
) -> Int4Weight:
    num_groups = 1 if group_size < 0 else shape[1] // group_size
    scale_OG = (torch.rand(shape[0], num_groups) / 100 + 0.002).to(scale_dtype)
    zero_OG = torch.randint(0, 17, scale_OG.shape) if has_zero else None
    weight = pack_int4(torch.randint(0, 16, shape).to(torch.uint8), scale_OG, zero_OG)
    assert weight is not None
    return weight


def multiplied(folder: Path, x_NI: Tensor, weight: Int4Weight, tile: SkinnyTile | WgmmaTile, out_NO: Tensor) -> None:
    defines = f'SOURCE="{tile.kernel}.cu"', f"KERNEL={tile.kernel}", *defines_of(weight, tile)
    launch = launch_of(len(x_NI), weight, tile, MULTIPROCESSORS)
    zero = weight.scale if weight.zero is None else weight.zero
    numbers = [len(x_NI), *weight.shape, weight.codes.shape[0], out_NO.stride(0)]
    library = played(folder, "int4_gemm", defines)
    num_flags = run(library, launch, [x_NI, weight.codes, weight.scale, zero, out_NO], numbers)
    assert num_flags == 0, "the next GEMM finds all flags down"


CASES: list[tuple[tuple[int, int], int, torch.dtype, bool, SkinnyTile | WgmmaTile, int]] = [
    ((80, 640), 128, torch.float16, True, SkinnyTile(1, 4, 2, 1), 5),
    ((80, 640), 128, torch.float16, True, SkinnyTile(2, 4, 4, 1), 8),
    ((48, 288), 32, torch.bfloat16, True, SkinnyTile(1, 2, 4, 1), 1),
    ((48, 320), 64, torch.float32, False, SkinnyTile(2, 4, 2, 1), 3),
    ((32, 160), -1, torch.float16, True, SkinnyTile(1, 2, 4, 1), 2),
    ((80, 640), 128, torch.float16, True, WgmmaTile(64, 1, 2, 1, 2), 40),
    ((400, 1280), 128, torch.float16, True, WgmmaTile(64, 2, 3, 1, 0), 70),
    ((144, 512), 128, torch.float16, True, WgmmaTile(16, 2, 3, 1, 3), 9),
    ((208, 288), 32, torch.bfloat16, True, WgmmaTile(16, 3, 2, 1, 1), 20),
    ((80, 320), 64, torch.float32, False, WgmmaTile(32, 1, 3, 2, 0), 33),
    ((48, 256), 256, torch.float16, False, WgmmaTile(128, 1, 2, 1, 2), 130),
    ((64, 160), -1, torch.float16, True, WgmmaTile(256, 1, 2, 1, 1), 250),
    ((144, 640), 128, torch.bfloat16, True, WgmmaTile(256, 2, 3, 1, 0), 100),
    ((48, 1280), 128, torch.float16, True, WgmmaTile(64, 1, 2, 2, 0), 40),
    ((80, 1280), 128, torch.float16, True, WgmmaTile(128, 1, 2, 2, 0), 90),
]
"""Shapes, group sizes, scales, zeros, tiles and rows."""


@pytest.mark.parametrize(("shape", "group_size", "scale_dtype", "has_zero", "tile", "num_rows"), CASES)
def test_rows_are_multiplied(
    folder: Path,
    shape: tuple[int, int],
    group_size: int,
    scale_dtype: torch.dtype,
    has_zero: bool,
    tile: SkinnyTile | WgmmaTile,
    num_rows: int,
) -> None:
    weight = made(shape, group_size, scale_dtype, has_zero=has_zero)
    x_NI, wide_NO = torch.randn(num_rows, shape[1]).bfloat16(), torch.full((num_rows, shape[0] + 9), 7.0).bfloat16()
    multiplied(folder, x_NI, weight, tile, wide_NO[:, : shape[0]])
    scales_sums = isinstance(tile, SkinnyTile) or (tile.rows <= 64 and not 0 < group_size < 128)
    value_OI = weight.dequantised() if scales_sums else weight.dequantised().bfloat16()
    right_NO = x_NI.double() @ value_OI.double().T
    off = (wide_NO[:, : shape[0]].double() - right_NO).abs().max() / right_NO.abs().max()
    assert float(off) < TOLERANCE
    assert (wide_NO[:, shape[0] :] == 7).all()


def test_a_nan_stays_in_its_row(folder: Path) -> None:
    weight, x_NI = made((64, 256), 128), torch.randn(7, 256).bfloat16()
    x_NI[3, 9] = float("nan")
    for tile in (SkinnyTile(1, 4, 2, 1), WgmmaTile(16, 1, 4, 1, 1), WgmmaTile(128, 1, 2, 1, 0)):
        out_NO = torch.empty(7, 64, dtype=torch.bfloat16)
        multiplied(folder, x_NI, weight, tile, out_NO)
        assert out_NO[3].isnan().all()
        assert out_NO[torch.arange(7) != 3].isfinite().all()


@pytest.mark.skipif(no_compiler_reason() is not None, reason="no NVRTC; pip install cuda-bindings nvidia-cuda-nvrtc")
@pytest.mark.parametrize(
    "tile", [SkinnyTile(1, 8, 4, 3), *(WgmmaTile(rows, 2, 3, 1, 1) for rows in (16, 32, 64, 128, 256))]
)
def test_kernels_compile_for_hopper_gpus(tile: SkinnyTile | WgmmaTile) -> None:
    headers = sorted(SOURCES.glob("*.cuh"))
    for group_size in (32, 64, 128, -1):
        defines = defines_of(made((16, 256), group_size), tile)
        name = f"{tile.kernel}.cu"
        assert compile_source((SOURCES / name).read_bytes(), name, defines, (9, 0), headers)


def test_tiles_of_the_table_serve_up_to_their_rows() -> None:
    tiles = cuda_tiles_in({"1": [1, 8, 4, 3], "64": [64, 2, 6, 2, 4]})
    expected: dict[int, Int4Tile] = {1: SkinnyTile(1, 8, 4, 3)}
    assert tiles == expected | dict.fromkeys(range(33, 65), WgmmaTile(64, 2, 6, 2, 4))


def test_few_tiles_are_shared_out_evenly_and_many_as_they_are() -> None:
    weight, tile = made((400, 1280), 128), WgmmaTile(64, 2, 3, 2, 0)
    assert launch_of(64, weight, tile, 10).blocks == 20
    assert launch_of(64, weight, tile, 100).blocks == 4 * 10, "a chunk each"
    assert launch_of(130, weight, replace(tile, splits=2), 10)[::3] == (2 * 3 * 4, 2)
    assert launch_of(1300, weight, replace(tile, splits=1), 10).blocks == 4 * 21


def test_small_groups_leave_place_for_fewer_slots() -> None:
    tile = WgmmaTile(128, 3, 5, 1, 1)
    assert "SLOTS=5" in defines_of(made((64, 256), 128), tile)
    small = made((64, 256), 32, torch.float32)
    assert "SLOTS=4" in defines_of(small, tile)
    assert launch_of(128, small, tile, 4).shared_bytes <= 227 << 10


def test_why_triton_multiplies_is_said() -> None:
    floats = pack_int4(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 2), None, FLOAT)
    assert floats is not None
    assert cuda_unsupported_reason(floats) == "its codes are floats"
    assert cuda_unsupported_reason(made((16, 64), 32)) == "it is not on a Hopper GPU"
