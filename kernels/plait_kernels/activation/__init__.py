"""Activations of gated MLPs (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.activation import reference
from plait_kernels.backends import triton_backend


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension: ``[N, I]`` in the dtype of the input."""
    backend = triton_backend(__name__) if gate_up_N2I.is_cuda else reference
    product_NI: Tensor = backend.silu_mul(gate_up_N2I)
    return product_NI


__all__ = ["silu_mul"]
