"""Gated activations in torch. Shapes: N rows, I the MLP's width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension: ``[N, I]`` in the dtype of the input."""
    gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
    return F.silu(gate_NI) * up_NI
