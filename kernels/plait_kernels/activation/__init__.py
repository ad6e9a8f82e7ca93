"""Activations of gated MLPs (arXiv 2002.05202)."""

from plait_kernels.activation.reference import silu_mul

__all__ = ["silu_mul"]
