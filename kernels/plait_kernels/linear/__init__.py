"""Products with a weight matrix that is held for many calls."""

from plait_kernels.linear.native import PanelMatrix, can_hold

__all__ = ["PanelMatrix", "can_hold"]
