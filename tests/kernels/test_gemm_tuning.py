"""GEMM tuning tables are found by the GPU's name or capability and hold what the skinny GEMM can do."""

import json
from pathlib import Path

import pytest
import torch
from plait_kernels.linear import Tile, fp8_tiles, gemm_tuning, tiles_for, tuning_file
from plait_kernels.linear.fp8_gemm_cuda import Form, gemm_launch, row_launch, tma_launch
from plait_kernels.linear.fp8_tiles import Fp8RowTile
from plait_kernels.linear.gemm_tuning import int4_tiles_of
from plait_kernels.linear.int4 import INTEGER, Int4Weight, pack_int4, stored_shape
from plait_kernels.linear.int4_gemm_cuda import LEFT_FLAGS, LEFT_SUMS, defines_of, launch_of
from plait_kernels.linear.int4_tiles import SkinnyTile, WgmmaTile, cuda_tiles_in

HOPPER, BLACKWELL, ADA = (9, 0), (10, 0), (8, 9)
FOLDER = Path(gemm_tuning.__file__).parent
ENTRIES = [
    (path.stem, shape, most_rows, numbers)
    for path in sorted(FOLDER.glob("gemm_tuning_*.json"))
    for shape, by_rows in json.loads(path.read_text()).items()
    for most_rows, numbers in by_rows.items()
]


TRITON_ENTRIES = [entry for entry in ENTRIES if not entry[1].startswith(("cuda", "tma"))]
CUDA_ENTRIES = [entry for entry in ENTRIES if entry[1].startswith("cuda int4")]
FP8_ENTRIES = [entry for entry in ENTRIES if entry[1].startswith("cuda fp8")]
TMA_ENTRIES = [entry for entry in ENTRIES if entry[1].startswith("tma fp8")]
MOST_SHARED_BYTES, MULTIPROCESSORS = 227 << 10, 132
"""Of a block on a Hopper GPU, and of an H200."""


@pytest.mark.parametrize(("table", "shape", "most_rows", "numbers"), TRITON_ENTRIES)
def test_tiles_take_their_matrices(table: str, shape: str, most_rows: str, numbers: list[int]) -> None:
    num_outputs, num_inputs = map(int, shape.rpartition(" ")[2].split("x"))
    assert most_rows in (("1", "8", "16", "64", "256") if shape.startswith(INTEGER) else ("16", "32", "64"))
    assert Tile(*numbers).fits_matrix(num_outputs, num_inputs), table


def int4_form(shape: str, group_size: int, scale_dtype: torch.dtype) -> Int4Weight:
    """A matrix without memory."""
    num_outputs, num_inputs = map(int, shape.rpartition(" ")[2].split("x"))
    codes = torch.empty(stored_shape(num_outputs, num_inputs), dtype=torch.int16, device="meta")
    scale = torch.empty(num_inputs // group_size, num_outputs, dtype=scale_dtype, device="meta")
    return Int4Weight(codes, scale, None, num_inputs, group_size)


@pytest.mark.parametrize(("table", "shape", "most_rows", "numbers"), CUDA_ENTRIES)
@pytest.mark.parametrize(("group_size", "scale_dtype"), [(128, torch.float16), (32, torch.float32)])
def test_int4_cuda_tiles_serve_and_fit_the_rows_they_stand_for(
    table: str, shape: str, most_rows: str, numbers: list[int], group_size: int, scale_dtype: torch.dtype
) -> None:
    weight, num_rows = int4_form(shape, group_size, scale_dtype), int(most_rows)
    tile = cuda_tiles_in({most_rows: numbers})[num_rows]
    assert isinstance(tile, SkinnyTile | WgmmaTile)
    launch = launch_of(num_rows, weight, tile, MULTIPROCESSORS)
    assert launch.shared_bytes <= MOST_SHARED_BYTES, table
    if isinstance(tile, SkinnyTile):
        assert num_rows <= 8
        return
    assert tile.splits <= 8
    assert not {"SLOTS=0", "SLOTS=1"} & {*defines_of(weight, tile)}, "one is copied while another is read"
    if tile.splits == 0:
        assert launch.blocks <= MULTIPROCESSORS * LEFT_FLAGS
        assert launch.blocks * tile.rows * tile.warpgroups * 64 <= MULTIPROCESSORS * LEFT_SUMS


@pytest.mark.parametrize(("table", "shape", "most_rows", "numbers"), FP8_ENTRIES)
def test_fp8_cuda_tiles_serve_and_fit_the_rows_they_stand_for(
    table: str, shape: str, most_rows: str, numbers: list[int]
) -> None:
    num_outputs, num_inputs = map(int, shape.rpartition(" ")[2].split("x"))
    tile, num_rows = fp8_tiles.cuda_tiles_in({most_rows: numbers})[int(most_rows)], int(most_rows)
    if isinstance(tile, Fp8RowTile):
        launch = row_launch((num_outputs, num_inputs), tile, MULTIPROCESSORS)
    else:
        assert num_rows <= tile.rows
        assert tile.splits <= 8
        launch = gemm_launch(num_rows, (num_outputs, num_inputs), Form("blocks" in shape), tile)
    assert launch.shared_bytes <= MOST_SHARED_BYTES, table


@pytest.mark.parametrize(("table", "shape", "most_rows", "numbers"), TMA_ENTRIES)
def test_fp8_tiles_copied_by_tma_fit_and_no_block_waits_for_another(
    table: str, shape: str, most_rows: str, numbers: list[int]
) -> None:
    num_outputs, num_inputs = map(int, shape.rpartition(" ")[2].split("x"))
    tile = fp8_tiles.tma_tiles_in({most_rows: numbers})[int(most_rows)]
    assert tile.splits <= 4, "a cluster of 8 large blocks waits for 8 free multiprocessors side by side"
    launch = tma_launch(int(most_rows), (num_outputs, num_inputs), Form("blocks" in shape), tile)
    assert launch.shared_bytes <= MOST_SHARED_BYTES, table
    assert launch.blocks <= MULTIPROCESSORS * (MOST_SHARED_BYTES // launch.shared_bytes)


@pytest.mark.parametrize(
    ("device_name", "file"),
    [
        ("NVIDIA H200", "gemm_tuning_h200.json"),
        ("NVIDIA H100 80GB HBM3", "gemm_tuning_h100.json"),
        ("NVIDIA A100-SXM4-80GB", "gemm_tuning_a100.json"),
        ("NVIDIA RTX PRO 6000 Blackwell", "gemm_tuning_rtx_pro_6000.json"),
        ("Some GPU", "gemm_tuning_some_gpu.json"),
    ],
)
def test_a_table_has_the_name_of_its_gpu(device_name: str, file: str) -> None:
    assert tuning_file(device_name) == FOLDER / file


@pytest.mark.parametrize(
    "device_name",
    ["NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb", "GRID H100X-80C", "Some GPU"],
)
def test_hoppers_share_the_table_of_the_h200(device_name: str) -> None:
    tiles = tiles_for(device_name, HOPPER, 4096, 12_288)
    assert sorted(tiles) == [*range(2, 17), *range(33, 65)]
    assert (tiles[2], tiles[16], tiles[64]) == (Tile(64, 128, 4, 4, 4), Tile(64, 128, 4, 4, 4), Tile(64, 128, 2, 4, 4))
    assert tiles_for(device_name, HOPPER, 6144, 4096) == {}


@pytest.mark.parametrize(("device_name", "capability"), [("NVIDIA B200", BLACKWELL), ("NVIDIA L40S", ADA)])
def test_a_capability_without_a_table_leaves_all_to_cublas(device_name: str, capability: tuple[int, int]) -> None:
    assert tiles_for(device_name, capability, 4096, 12_288) == {}


def test_a_gpus_own_table_goes_before_its_capabilitys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_tuning, "__file__", str(tmp_path / "gemm_tuning.py"))
    gemm_tuning.tuning_table.cache_clear()
    try:
        (tmp_path / "gemm_tuning_h200.json").write_text('{"64x64": {"16": [64, 64, 1, 4, 4]}}')
        (tmp_path / "gemm_tuning_h100.json").write_text('{"64x64": {"32": [32, 64, 1, 4, 4]}}')
        assert sorted(tiles_for("NVIDIA H100 NVL", HOPPER, 64, 64)) == list(range(17, 33))
        assert sorted(tiles_for("NVIDIA H200", HOPPER, 64, 64)) == list(range(2, 17))
    finally:
        gemm_tuning.tuning_table.cache_clear()


def test_without_a_table_every_small_number_of_rows_is_multiplied_by_4_bits() -> None:
    codes, scale = torch.zeros(256, 512, dtype=torch.uint8), torch.ones(256, 4, dtype=torch.float16)
    weight = pack_int4(codes, scale, None, INTEGER)
    assert weight is not None
    assert sorted(int4_tiles_of(weight)) == list(range(1, 257))
