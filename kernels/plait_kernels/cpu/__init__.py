"""The compiled CPU kernels behind the families' ``native`` backends."""
