"""A GPU that multiplies 4-bit weights wrong is refused at start."""

from __future__ import annotations

import pytest
import torch
from plait_kernels.linear import Int4Matrix, Int4Weight
from plait_kernels.linear.int4 import pack_int4
from plait_kernels.moe import Int4Experts, stack_int4
from plait_worker.errors import WorkerError
from plait_worker.weights.formats import gemm_check, int4_check
from torch import Tensor

EXPERTS = Int4Experts.__call__


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch) -> Int4Weight:
    monkeypatch.setattr(gemm_check, "_checked", set())
    return packed(272, 256, 0)


def packed(num_outputs: int, num_inputs: int, seed: int) -> Int4Weight:
    drawn, num_groups = torch.Generator().manual_seed(seed), num_inputs // 128
    codes = torch.randint(0, 16, (num_outputs, num_inputs), generator=drawn, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (num_outputs, num_groups), generator=drawn, dtype=torch.uint8)
    made = pack_int4(codes, torch.rand(num_outputs, num_groups, generator=drawn).bfloat16() / num_inputs, zeros)
    assert made is not None
    return made


def test_right_gemms_pass_once_for_each_form(weight: Int4Weight) -> None:
    int4_check.check_int4(weight)
    assert gemm_check._checked == {("int4", 128, True, False, "a matrix")}


def test_a_wrong_gemm_is_refused_with_what_to_do(weight: Int4Weight, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Int4Matrix.__call__

    def wrong_for_many_rows_of_the_whole(matrix: Int4Matrix, x_NI: Tensor) -> Tensor:
        out_NO = right(matrix, x_NI)
        return out_NO if len(x_NI) < 64 or matrix.num_outputs < 272 else out_NO.roll(1, dims=1)

    monkeypatch.setattr(Int4Matrix, "__call__", wrong_for_many_rows_of_the_whole)
    with pytest.raises(WorkerError, match=r"groups of 128 are wrong on this GPU: 64 rows .*--dtype bfloat16"):
        int4_check.check_int4(weight)


def test_experts_are_compared_too(weight: Int4Weight, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, right = stack_int4((packed(512, 128, seed), packed(128, 256, 9 + seed)) for seed in range(3)), EXPERTS
    int4_check.check_int4_experts(experts)
    monkeypatch.setattr(gemm_check, "_checked", set())
    monkeypatch.setattr(Int4Experts, "__call__", lambda *given: right(*given).roll(1, dims=1))
    with pytest.raises(WorkerError, match=r"GEMMs of experts of int4 weights .* 1 rows are off"):
        int4_check.check_int4_experts(experts)
