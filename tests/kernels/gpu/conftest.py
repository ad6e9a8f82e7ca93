"""Fixtures of the GPU kernels' tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same inputs in every run, so that rounding does not differ either."""
    torch.manual_seed(0)
