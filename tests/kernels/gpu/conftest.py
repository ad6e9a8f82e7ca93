"""What the GPU's tests of kernels share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same inputs in every run: what rounding makes of them does not differ either."""
    torch.manual_seed(0)
