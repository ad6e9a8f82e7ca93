"""A dense matrix gives the same output whichever backend holds it."""

import pytest
import torch
from plait_kernels.linear import DENSE, PanelMatrix, dense_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 300])
def test_outputs_are_rounded_once(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 72).to(dtype), torch.randn(num_rows, 72).to(dtype)
    added = torch.randn(40).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    given = dense_matrix(weight, added)(x)
    assert given.dtype == dtype
    torch.testing.assert_close(given.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_a_matrix_is_held_by_the_first_backend_that_takes_it() -> None:
    odd = torch.zeros(8, 7, dtype=torch.bfloat16)
    assert isinstance(dense_matrix(torch.zeros(8, 7)), PanelMatrix)
    assert not isinstance(dense_matrix(odd), PanelMatrix)
    assert isinstance(dense_matrix(torch.zeros(8, 7, dtype=torch.float16)), DENSE[-1])
    refusals = [backend.unsupported_reason(odd) for backend in DENSE]
    assert refusals[:2] == ["is for cuda, not cpu", "takes bfloat16 with an even number of inputs, not 7"]
    assert refusals[-1] is None
