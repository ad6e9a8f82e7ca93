"""Root-mean-square normalisation (arXiv 1910.07467)."""

from plait_kernels.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
