"""However a matrix is held, its products are the same."""

import pytest
import torch
from plait_worker.layers.matrix import matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 300])
def test_products_are_rounded_once(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 72).to(dtype), torch.randn(num_rows, 72).to(dtype)
    added = torch.randn(40).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    product = matrix(weight, added)(x)
    assert product.dtype == dtype
    torch.testing.assert_close(product.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
