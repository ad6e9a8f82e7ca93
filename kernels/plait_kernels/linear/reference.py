"""A matrix times one row in torch. Shapes: I inputs, O outputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def multiply_row(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.multiply_row``."""
    return F.linear(x_1I, weight_OI)
