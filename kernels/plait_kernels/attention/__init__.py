"""Attention: the plain form that every backend is measured against."""

from plait_kernels.attention.reference import attend

__all__ = ["attend"]
