"""Rotary position embedding (arXiv 2104.09864), the form that rotates the two halves of a head."""

from plait_kernels.rope.reference import apply_rope, rope_tables

__all__ = ["apply_rope", "rope_tables"]
