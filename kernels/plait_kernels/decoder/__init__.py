"""A stack of dense decoder layers in one call; its reference is the models' own composition of the other families."""

from plait_kernels.decoder.cpu import DenseBlock, DenseStack, can_stack

__all__ = ["DenseBlock", "DenseStack", "can_stack"]
