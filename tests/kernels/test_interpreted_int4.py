"""The 4-bit kernels agree with float64 of their formats' definitions in Triton's interpreter.

On a GPU two codes become values at once; that way is tried by tests/kernels/gpu.
"""

import os

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU is here, which runs the compiled kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, and Triton's own are when it is imported
pytest.importorskip("triton", reason="no Triton; pip install triton")

from plait_kernels.linear import Int4Weight, Tile, int4_gemm_triton
from plait_kernels.linear.int4 import FLOAT, INTEGER, pack_int4
from plait_kernels.moe import int4_grouped_gemm_triton, stack_int4
from plait_kernels.moe.grouped_gemm_triton import Tile as GroupedTile
from plait_kernels.moe.int4_experts import reference_parts


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def made(shape: tuple[int, int], group_size: int, kind: str, *, has_zero: bool) -> Int4Weight:
    num_groups = 1 if group_size < 0 else shape[1] // group_size
    zero_OG = torch.randint(0, 17, (shape[0], num_groups)) if has_zero else None
    codes, scale_OG = torch.randint(0, 16, shape).to(torch.uint8), torch.rand(shape[0], num_groups).half() / 8
    weight = pack_int4(codes, scale_OG, zero_OG, kind)
    assert weight is not None
    return weight


def assert_close(given: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(given.double(), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "group_size", "kind", "has_zero"),
    [
        ((64, 256), 128, INTEGER, True),
        ((48, 288), 32, INTEGER, True),
        ((16, 320), 64, INTEGER, False),
        ((32, 160), -1, INTEGER, True),
        ((32, 512), 256, INTEGER, False),
        ((80, 160), 32, FLOAT, False),
    ],
)
def test_few_and_many_rows_multiply(shape: tuple[int, int], group_size: int, kind: str, has_zero: bool) -> None:
    weight = made(shape, group_size, kind, has_zero=has_zero)
    for num_rows, tile in (
        (1, Tile(64, 256, 1, 3, 4)),
        (5, Tile(32, 128, 2, 3, 2)),
        (20, Tile(64, 128, 4, 3, 4)),
        (130, Tile(64, 128, 1, 3, 4)),
    ):
        x_NI, wide_NO = torch.randn(num_rows, shape[1]), torch.full((num_rows, shape[0] + 9), 7.0)
        int4_gemm_triton.int4_gemm(x_NI, weight, tile, wide_NO[:, : shape[0]])
        assert_close(wide_NO[:, : shape[0]], x_NI.double() @ weight.dequantised().double().T)
        assert (wide_NO[:, shape[0] :] == 7).all()


def test_matrices_are_de_quantised_whole_and_in_panels() -> None:
    for weight in (made((80, 288), 32, INTEGER, has_zero=True), made((96, 256), 64, FLOAT, has_zero=False)):
        right_OI = weight.dequantised()
        assert torch.equal(int4_gemm_triton.int4_dequantise(weight, range(len(right_OI)), 9 + right_OI), right_OI)
        panel_OI = torch.full((16, weight.num_inputs), 9.0)
        int4_gemm_triton.int4_dequantise(weight, range(64, 80), panel_OI)
        assert torch.equal(panel_OI, right_OI[64:80])


@pytest.mark.parametrize(("kind", "group_size", "width"), [(INTEGER, 128, 128), (INTEGER, 32, 96), (FLOAT, 32, 32)])
def test_experts_multiply_the_rows_of_their_lists(kind: str, group_size: int, width: int) -> None:
    has_zero = kind == INTEGER
    experts = stack_int4(
        (
            made((2 * width, 128), group_size, kind, has_zero=has_zero),
            made((128, width), group_size, kind, has_zero=has_zero),
        )
        for _ in range(3)
    )
    x_TH, chosen_TK = torch.randn(9, 128), torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    chosen_TK[0, 1] = -1
    is_here_N = chosen_TK.flatten() >= 0
    right_NH = reference_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK)[is_here_N]
    for tile in (None, GroupedTile(8, 64, 256, 4, 3)):
        given_NH = int4_grouped_gemm_triton.expert_parts(
            x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK, 20.0, tile
        )
        assert float((given_NH[is_here_N] - right_NH).abs().max() / right_NH.abs().max()) < 1e-5
