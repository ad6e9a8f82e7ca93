"""RMS norm with its weight. Shapes: N rows, D the width."""

from __future__ import annotations

from plait_kernels.norm import add_rms_norm, rms_norm
from torch import Tensor

from plait_worker.weights.reader import Weights


class RmsNorm:
    """``x / rms(x) * weight``; held whole by every rank."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        """Read ``NAME.weight``."""
        self.weight_D = weights.take(f"{name}.weight", (width,))
        self.eps = eps

    def __call__(self, x_ND: Tensor) -> Tensor:
        """``[N, D]``."""
        return rms_norm(x_ND, self.weight_D, self.eps)

    def add(self, x_ND: Tensor, residual_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        return add_rms_norm(x_ND, residual_ND, self.weight_D, self.eps)
