"""Plait's kernels: one function for each operation, a dispatch table of backends behind it."""
