"""A whole stack of decoder blocks in one call; its plain form is the models' own composition of the other families."""

from plait_kernels.decoder.native import DenseBlock, DenseStack, can_stack

__all__ = ["DenseBlock", "DenseStack", "can_stack"]
