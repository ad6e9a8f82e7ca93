"""Attention: the plain form that every backend is measured against, and the joining of its parts."""

from plait_kernels.attention.merge import merge
from plait_kernels.attention.reference import attend

__all__ = ["attend", "merge"]
