"""4-bit weights mean what their formats define, however they are cut, joined and stored."""

from __future__ import annotations

import pytest
import torch
from plait_kernels.linear import Int4Matrix, Int4Weight
from plait_kernels.linear.int4 import FLOAT, join, num_bytes, pack_int4
from plait_kernels.moe import reference as moe_reference
from plait_kernels.moe import stack_int4
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def made(
    shape: tuple[int, int], group_size: int, kind: str = "int4", *, has_zero: bool = True, is_mixed: bool = False
) -> tuple[Int4Weight, Tensor]:
    """A weight, and what its numbers mean in float64; ``is_mixed`` is act-order."""
    num_outputs, num_inputs = shape
    size = num_inputs if group_size < 0 else group_size
    code_OI = torch.randint(0, 16, shape).to(torch.uint8)
    scale_OG = torch.rand(num_outputs, num_inputs // size).half() + 0.01
    zero_OG = torch.randint(0, 17, scale_OG.shape) if has_zero and kind != FLOAT else None
    order = torch.randperm(num_inputs) if is_mixed else torch.arange(num_inputs)
    group_I = torch.empty(num_inputs, dtype=torch.long).index_copy_(0, order, torch.arange(num_inputs) // size)
    weight = pack_int4(code_OI, scale_OG, zero_OG, kind, group_I if is_mixed else None)
    assert weight is not None
    less = 8 if zero_OG is None else zero_OG[:, group_I]
    value_OI = E2M1[code_OI.long()] if kind == FLOAT else code_OI.double() - less
    return weight, value_OI * scale_OG.double()[:, group_I]


FORMS = [
    *(
        ("int4", size, zero, mixed)
        for size in (32, 64, 128, 256, -1)
        for zero in (True, False)
        for mixed in (True, False)
    ),
    ("mxfp4", 32, False, False),
]


@pytest.mark.parametrize(("kind", "group_size", "has_zero", "is_mixed"), FORMS)
def test_codes_stand_for_their_values(kind: str, group_size: int, has_zero: bool, is_mixed: bool) -> None:
    weight, meant = made((48, 512), group_size, kind, has_zero=has_zero, is_mixed=is_mixed)
    assert weight.shape == (48, 512)
    assert torch.equal(weight.dequantised(), meant.float())
    x, bias = torch.randn(5, 512), torch.randn(48)
    given = Int4Matrix([weight], bias)(x)
    torch.testing.assert_close(given.double(), x.double() @ meant.T + bias, atol=1e-3, rtol=1e-4)
    assert weight.nbytes == num_bytes((48, 512), weight.group_size, scale_bytes=2, has_zero=weight.zero is not None) + (
        512 * 8 if weight.order_I is not None else 0
    )


@pytest.mark.parametrize("num_inputs", [32, 96, 160, 2880])
def test_inputs_need_not_fill_a_chunk(num_inputs: int) -> None:
    weight, meant = made((16, num_inputs), 32)
    assert torch.equal(weight.dequantised(), meant.float())
    assert torch.equal(weight.reordered(torch.arange(16).flip(0)).dequantised(), meant.float().flip(0))


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_groups"), [(24, 128, 1), (16, 96, 2), (16, 80, 1), (16, 40, 5)]
)
def test_what_the_kernels_do_not_take_is_not_packed(num_outputs: int, num_inputs: int, num_groups: int) -> None:
    code = torch.zeros(num_outputs, num_inputs, dtype=torch.uint8)
    assert pack_int4(code, torch.ones(num_outputs, num_groups), None) is None


def test_groups_of_unequal_size_are_not_packed() -> None:
    group_I = torch.arange(256) // 64
    group_I[0] = 3
    assert pack_int4(torch.zeros(16, 256, dtype=torch.uint8), torch.ones(16, 4), None, group_I=group_I) is None


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("columns", [range(256), range(128, 384), range(32, 96), range(100, 200), range(384, 512)])
def test_ranks_cut_on_the_bounds_of_groups(group_size: int, columns: range) -> None:
    weight, meant = made((32, 512), group_size)
    cut = weight.columns(columns)
    step = 32 if group_size < 0 else group_size
    assert (cut is not None) == (columns.start % step == 0 and columns.stop % step == 0)
    if cut is not None:
        assert torch.equal(cut.dequantised(), meant.float()[:, columns.start : columns.stop])


def test_outputs_are_cut_by_sixteens_and_mixed_inputs_never() -> None:
    weight, meant = made((64, 256), 64, is_mixed=True)
    cut = weight.rows(range(16, 48))
    assert cut is not None
    assert torch.equal(cut.to(torch.device("cpu")).dequantised(), meant.float()[16:48])
    assert weight.rows(range(8, 24)) is None
    assert weight.columns(range(128)) is None
    assert weight.columns(range(256)) is weight


def test_joined_matrices_are_as_few_as_have_one_form() -> None:
    parts = [made((32, 256), 64), made((16, 256), 64, has_zero=False), made((32, 256), 128), made((16, 256), 128)]
    joined = join([weight for weight, _ in parts])
    assert [weight.shape[0] for weight in joined] == [48, 48]
    x = torch.randn(3, 256)
    right = x.double() @ torch.cat([meant for _, meant in parts]).T
    torch.testing.assert_close(Int4Matrix(joined, None)(x).double(), right, atol=1e-3, rtol=1e-4)


def test_matrices_of_different_input_orders_stay_apart() -> None:
    parts = [made((32, 256), 64, is_mixed=True) for _ in range(2)]
    joined = join([weight for weight, _ in parts])
    assert len(joined) == 2
    x = torch.randn(3, 256)
    right = x.double() @ torch.cat([meant for _, meant in parts]).T
    torch.testing.assert_close(Int4Matrix(joined, None)(x).double(), right, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_experts_are_the_weighted_sum_of_their_mlps(kind: str) -> None:
    gate_ups, downs = ([made(shape, 32, kind) for _ in range(3)] for shape in ((64, 96), (96, 32)))
    experts = stack_int4((a, b) for (a, _), (b, _) in zip(gate_ups, downs, strict=True))
    x, weights, chosen = torch.randn(7, 96), torch.rand(7, 2), torch.rand(7, 3).argsort(dim=1)[:, :2]
    gate_up, down = (torch.stack([meant for _, meant in each]) for each in (gate_ups, downs))
    parts = moe_reference.expert_parts(x.double(), gate_up, down, chosen).unflatten(0, (7, 2))
    right = torch.einsum("tkh,tk->th", parts, weights.double())
    assert float((experts(x, weights, chosen).double() - right).abs().max() / right.abs().max()) < 1e-5
