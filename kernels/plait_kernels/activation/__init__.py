"""Activations of gated MLPs (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Op, on_device

_silu_mul = Op(__name__, "silu_mul", Backend("triton", (on_device("cuda"),)), Backend("reference"))


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension: ``[N, I]`` in the dtype of the input."""
    out_NI: Tensor = _silu_mul(gate_up_N2I)(gate_up_N2I)
    return out_NI


__all__ = ["silu_mul"]
