"""A GPU that multiplies 4-bit weights wrong is refused at start."""

from __future__ import annotations

import pytest
import torch
from plait_kernels.linear import Int4Matrix, Int4Weight
from plait_kernels.linear.int4 import pack_int4
from plait_worker.errors import WorkerError
from plait_worker.weights.formats import int4_check
from torch import Tensor


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch) -> Int4Weight:
    monkeypatch.setattr(int4_check, "_checked", set())
    drawn = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (272, 256), generator=drawn, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (272, 2), generator=drawn, dtype=torch.uint8)
    packed = pack_int4(codes, torch.rand(272, 2, generator=drawn).bfloat16(), zeros)
    assert packed is not None
    return packed


def test_right_gemms_pass_once_for_each_form(weight: Int4Weight) -> None:
    int4_check.check_int4(weight)
    assert int4_check._checked == {("int4", 128, True, False)}


def test_a_wrong_gemm_is_refused_with_what_to_do(weight: Int4Weight, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Int4Matrix.__call__

    def wrong_for_many_rows(matrix: Int4Matrix, x_NI: Tensor) -> Tensor:
        out_NO = right(matrix, x_NI)
        return out_NO if len(x_NI) < 64 else out_NO.roll(1, dims=1)

    monkeypatch.setattr(Int4Matrix, "__call__", wrong_for_many_rows)
    with pytest.raises(WorkerError, match=r"groups of 128 are wrong on this GPU: 64 rows .*--dtype bfloat16"):
        int4_check.check_int4(weight)
