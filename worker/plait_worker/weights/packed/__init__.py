"""Checkpoints whose matrices are packed integers with a scale a group: AWQ, GPTQ and compressed-tensors."""
